package sweep_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock/internal/sweep"
)

func TestATaskIsRepeatedWithGrowingPausesUntilItIsDone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := sweep.New(2, time.Second)
		start := time.Now()
		var tries []time.Duration
		s.Add(sweep.Task{Until: start.Add(time.Hour), Do: func(context.Context) bool {
			tries = append(tries, time.Since(start))
			return len(tries) == 5
		}})
		require.NoError(t, s.Wait(t.Context()))
		ms := time.Millisecond
		require.Equal(t, []time.Duration{0, 50 * ms, 150 * ms, 350 * ms, 750 * ms}, tries)
	})
}

func TestATaskEndsWithItsTimeAndIsTriedOnceMoreThen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := sweep.New(2, time.Second)
		start := time.Now()
		var last time.Duration
		n := 0
		s.Add(sweep.Task{Until: start.Add(10 * time.Second), Do: func(context.Context) bool {
			last = time.Since(start)
			n++
			return false
		}})
		require.NoError(t, s.Wait(t.Context()))
		require.Equal(t, 10*time.Second, last)
		require.Less(t, n, 12)
	})
}

func TestFewTasksRunAtOnceAndNoneIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := sweep.New(3, time.Second)
		var running, most, done atomic.Int32
		for range 100 {
			tries := 0
			s.Add(sweep.Task{Until: time.Now().Add(time.Hour), Do: func(ctx context.Context) bool {
				most.Store(max(most.Load(), running.Add(1)))
				defer running.Add(-1)
				<-ctx.Done() // hangs until its time is over
				tries++
				if tries == 2 {
					done.Add(1)
				}
				return tries == 2
			}})
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.ErrorIs(t, s.Wait(ctx), context.DeadlineExceeded)
		require.NoError(t, s.Wait(t.Context()))
		require.EqualValues(t, 100, done.Load())
		require.EqualValues(t, 3, most.Load())
	})
}

func TestABacklogEndsWithItsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := sweep.New(2, time.Second)
		start := time.Now()
		tries := 0
		var mu sync.Mutex
		for range 400 {
			s.Add(sweep.Task{Until: start.Add(3 * time.Second), Do: func(ctx context.Context) bool {
				mu.Lock()
				tries++
				mu.Unlock()
				<-ctx.Done()
				return false
			}})
		}
		require.NoError(t, s.Wait(t.Context()))
		require.LessOrEqual(t, time.Since(start), 5*time.Second)
		require.Less(t, tries, 20)
	})
}
