package locktest

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
)

// lossTests are about leases that end while they are in use.
var lossTests = []test{
	{"a lock that was deleted is told of", func(t *testing.T, b *bench) {
		l, n := b.locker(t), b.name()
		lk := acquire(t, l, n)
		b.Delete(t, n)
		cause := requireEnd(t, lk.Context())
		require.ErrorIs(t, cause, lock.ErrLost)
		require.False(t, lk.Valid())
		require.ErrorIs(t, lk.Extend(within(t), time.Minute), lock.ErrLost)
		require.ErrorIs(t, lk.Release(within(t)), lock.ErrLost)
		require.ErrorIs(t, lk.Release(within(t)), lock.ErrLost, "the outcome is final")
		requireFree(t, l, n)
	}},
	{"a lock that was taken over is left to the other", func(t *testing.T, b *bench) {
		l, n := b.locker(t), b.name()
		lk := acquire(t, l, n)
		b.Overwrite(t, n)
		require.ErrorIs(t, requireEnd(t, lk.Context()), lock.ErrLost)
		require.ErrorIs(t, lk.Release(within(t)), lock.ErrLost)
		requireHeld(t, l, n)
		b.Delete(t, n)
		requireFree(t, l, n)
	}},
	{"Extend after a deletion is a loss, and creates nothing", func(t *testing.T, b *bench) {
		l, n := b.locker(t, lock.WithTTL(time.Minute)), b.name()
		lk := acquire(t, l, n)
		b.Delete(t, n)
		require.ErrorIs(t, lk.Extend(within(t), time.Minute), lock.ErrLost)
		require.ErrorIs(t, context.Cause(lk.Context()), lock.ErrLost)
		next, err := b.locker(t).TryAcquire(within(t), n)
		require.NoError(t, err)
		require.ErrorIs(t, lk.Release(within(t)), lock.ErrLost)
		require.True(t, next.Valid())
		release(t, next)
	}},
	{"a release that finds nothing is a loss", func(t *testing.T, b *bench) {
		l, n := b.locker(t, lock.WithTTL(time.Minute)), b.name()
		lk := acquire(t, l, n)
		b.Delete(t, n)
		require.ErrorIs(t, lk.Release(within(t)), lock.ErrLost)
	}},
	{"Do joins a loss to what fn returns", func(t *testing.T, b *bench) {
		l, n, own := b.locker(t), b.name(), errors.New("own")
		err := l.Do(within(t), n, func(ctx context.Context) error {
			b.Delete(t, n)
			require.ErrorIs(t, requireEnd(t, ctx), lock.ErrLost)
			return own
		})
		require.ErrorIs(t, err, lock.ErrLost)
		require.ErrorIs(t, err, own)
	}},
	{"after a loss the next lock is renewed as usual", func(t *testing.T, b *bench) {
		l, n := b.locker(t), b.name()
		lk := acquire(t, l, n)
		b.Delete(t, n)
		requireEnd(t, lk.Context())
		next := acquire(t, l, n)
		ctx, cancel := context.WithTimeout(t.Context(), 3*ttl)
		defer cancel()
		_, err := b.locker(t).Acquire(ctx, n)
		require.ErrorIs(t, err, ctx.Err())
		require.True(t, next.Valid())
		release(t, next)
	}},
}
