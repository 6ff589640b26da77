package locktest

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
)

// fenceTests are about fencing tokens.
var fenceTests = []test{
	{"fences rise over release, expiry and deletion", func(t *testing.T, b *bench) {
		for _, mode := range []lock.Option{lock.WithFencing(), lock.WithClockFencing()} {
			x, y, n := b.locker(t, mode), b.locker(t, mode, lock.WithMaxHold(time.Millisecond)), b.name()
			last := lock.Fence(0)
			rise := func(f lock.Fence) {
				t.Helper()
				require.Greater(t, f, last)
				last = f
			}
			lk := acquire(t, x, n)
			rise(lk.Fence())
			release(t, lk)
			lk = acquire(t, y, n) // is not renewed
			rise(lk.Fence())
			requireEnd(t, lk.Context())
			require.ErrorIs(t, lk.Release(within(t)), lock.ErrLost)
			lk = acquire(t, x, n)
			rise(lk.Fence())
			b.Delete(t, n)
			requireEnd(t, lk.Context())
			lk = acquire(t, y, n)
			rise(lk.Fence())
			release(t, lk)
			_, err := x.TryAcquire(within(t), n)
			require.NoError(t, err)
			b.Delete(t, n)
		}
	}},
	{"a plain counter counts from one", func(t *testing.T, b *bench) {
		l, n := b.locker(t, lock.WithFencing()), b.name()
		for i := range 5 {
			lk := acquire(t, l, n)
			require.EqualValues(t, i+1, lk.Fence())
			release(t, lk)
		}
	}},
	{"a clock fence is about the time in microseconds", func(t *testing.T, b *bench) {
		l, n := b.locker(t, lock.WithClockFencing()), b.name()
		lk := acquire(t, l, n)
		require.InDelta(t, time.Now().UnixMicro(), int64(lk.Fence()), float64(time.Hour.Microseconds()))
		release(t, lk)
	}},
	{"fences are exact beyond 2^53", func(t *testing.T, b *bench) {
		if b.SetFence == nil {
			return
		}
		for _, mode := range []lock.Option{lock.WithFencing(), lock.WithClockFencing()} {
			l, n := b.locker(t, mode), b.name()
			const preset = 1 << 53
			b.SetFence(t, n, preset)
			for i := range 4 {
				lk := acquire(t, l, n)
				require.EqualValues(t, preset+1+i, lk.Fence())
				release(t, lk)
			}
		}
	}},
}
