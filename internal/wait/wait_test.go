package wait_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock/internal/wait"
)

func TestPausesGrowUpToAFallbackAndDiffer(t *testing.T) {
	var a, b wait.Pause
	same := 0
	for n := range 100 {
		x, y := a.Next(0), b.Next(0)
		if x == y {
			same++
		}
		require.Positive(t, x)
		require.LessOrEqual(t, x, 250*time.Millisecond)
		if n > 20 {
			require.GreaterOrEqual(t, x, 100*time.Millisecond)
		}
	}
	require.Less(t, same, 50)
}

func TestNobodySleepsLongerThanTheHoldersLease(t *testing.T) {
	var p wait.Pause
	for range 100 {
		require.LessOrEqual(t, p.Next(3*time.Millisecond), 4*time.Millisecond)
	}
}

func TestSleepEndsWithTheContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		require.True(t, wait.Sleep(ctx, 500*time.Millisecond))
		require.False(t, wait.Sleep(ctx, time.Hour))
		require.Equal(t, time.Second, time.Since(start))
	})
}
