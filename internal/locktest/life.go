package locktest

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
)

// lifeTests are about taking and giving up.
var lifeTests = []test{
	{"one holder at a time", func(t *testing.T, b *bench) {
		x, y, n := b.locker(t), b.locker(t), b.name()
		lk := acquire(t, x, n)
		require.True(t, lk.Valid())
		require.Equal(t, n, lk.Name())
		require.Zero(t, lk.Fence())
		requireHeld(t, y, n)
		requireHeld(t, x, n)
		require.ErrorIs(t, y.TryDo(within(t), n, nothing), lock.ErrHeld)
		release(t, lk)
		require.False(t, lk.Valid())
		require.Equal(t, lock.ErrReleased, context.Cause(lk.Context()))
		requireFree(t, y, n)
	}},
	{"a waiter gets in after the release", func(t *testing.T, b *bench) {
		x, y, n := b.locker(t), b.locker(t), b.name()
		lk := acquire(t, x, n)
		got := make(chan error)
		go func() {
			got <- y.Do(within(t), n, func(context.Context) error {
				if lk.Valid() {
					return errors.New("two holders")
				}
				return nil
			})
		}()
		release(t, lk)
		require.NoError(t, <-got)
	}},
	{"waiting ends with its context", func(t *testing.T, b *bench) {
		x, y, n := b.locker(t), b.locker(t), b.name()
		lk := acquire(t, x, n)
		ctx, cancel := context.WithTimeout(t.Context(), ttl)
		defer cancel()
		_, err := y.Acquire(ctx, n)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		var e *lock.Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, n, e.Name)
		_, err = y.With(lock.WithMaxWait(ttl/2)).Acquire(within(t), n)
		require.NotErrorIs(t, err, context.DeadlineExceeded)
		require.Error(t, err)
		cancel()
		_, err = y.Acquire(ctx, n)
		require.ErrorIs(t, err, ctx.Err())
		require.NotErrorIs(t, err, lock.ErrHeld, "nobody was asked")
		release(t, lk)
	}},
	{"Do returns what fn does", func(t *testing.T, b *bench) {
		l, n, own := b.locker(t), b.name(), errors.New("own")
		require.NoError(t, l.Do(within(t), n, nothing))
		require.Equal(t, own, l.Do(within(t), n, func(context.Context) error { return own }))
		require.Equal(t, own, l.TryDo(within(t), n, func(context.Context) error { return own }))
		require.Error(t, l.Do(within(t), n, nil))
		require.Error(t, l.Do(within(t), "", nothing))
		requireFree(t, l, n)
	}},
	{"Do releases after a panic and Goexit", func(t *testing.T, b *bench) {
		l, other, n := b.locker(t), b.locker(t), b.name()
		private := new(int)
		func() {
			defer func() { require.Same(t, private, recover()) }()
			_ = l.Do(within(t), n, func(context.Context) error { panic(private) })
		}()
		requireFree(t, other, n)
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = l.Do(within(t), n, func(context.Context) error { runtime.Goexit(); return nil })
		}()
		<-done
		requireFree(t, other, n)
	}},
	{"a lease is renewed for as long as it is held", func(t *testing.T, b *bench) {
		x, y, n := b.locker(t), b.locker(t), b.name()
		lk := acquire(t, x, n)
		ctx, cancel := context.WithTimeout(t.Context(), 4*ttl)
		defer cancel()
		_, err := y.Acquire(ctx, n)
		require.ErrorIs(t, err, ctx.Err())
		require.NoError(t, context.Cause(lk.Context()))
		require.True(t, lk.Valid())
		require.Positive(t, time.Until(lk.Deadline()))
		release(t, lk)
		requireFree(t, y, n)
	}},
	{"Extend makes a lease last, and never shortens it", func(t *testing.T, b *bench) {
		l, n := b.locker(t), b.name()
		lk := acquire(t, l, n)
		require.NoError(t, lk.Extend(within(t), time.Hour))
		deadline := lk.Deadline()
		require.Greater(t, time.Until(deadline), 59*time.Minute)
		require.NoError(t, lk.Extend(within(t), ttl))
		require.Equal(t, deadline, lk.Deadline())
		require.Error(t, lk.Extend(within(t), 0))
		require.Equal(t, deadline, lk.Deadline())
		release(t, lk)
		require.ErrorIs(t, lk.Extend(within(t), ttl), lock.ErrReleased)
		requireFree(t, l, n)
	}},
	{"a release is done once, however often it is called", func(t *testing.T, b *bench) {
		l, other, n := b.locker(t), b.locker(t), b.name()
		lk := acquire(t, l, n)
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() {
				if err := lk.Release(within(t)); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		next := acquire(t, other, n)
		release(t, lk)
		require.True(t, next.Valid())
		requireHeld(t, l, n)
		release(t, next)
	}},
	{"a release needs no living context", func(t *testing.T, b *bench) {
		l, n := b.locker(t), b.name()
		ctx, cancel := context.WithCancel(t.Context())
		lk, err := l.Acquire(ctx, n)
		require.NoError(t, err)
		cancel()
		require.NoError(t, lk.Release(ctx))
		requireFree(t, l, n)
	}},
	{"reentry is refused", func(t *testing.T, b *bench) {
		l, n, m := b.locker(t), b.name(), b.name()
		require.NoError(t, l.Do(within(t), n, func(ctx context.Context) error {
			require.ErrorIs(t, l.Do(ctx, n, nothing), lock.ErrReentrant)
			return l.Do(ctx, m, func(ctx context.Context) error {
				lk, ok := lock.FromContext(ctx)
				require.True(t, ok)
				require.Equal(t, m, lk.Name())
				require.ErrorIs(t, l.TryDo(ctx, n, nothing), lock.ErrReentrant)
				return nil
			})
		}))
	}},
	{"names are bytes", func(t *testing.T, b *bench) {
		x, y := b.locker(t), b.locker(t)
		id := b.name()
		var held []*lock.Lock
		for _, n := range []string{
			"a", "a\x00b", "\xff", "\xfe", "é", "e\u0301", "a b", "a\nb", "}", "}x", "{", "{}", "a}b{c", "{u1}:cart", "{{x}}",
			strings.Repeat("x", 1<<16),
		} {
			lk, err := x.TryAcquire(within(t), n+id)
			require.NoError(t, err, "%.20q is no other name", n)
			held = append(held, lk)
		}
		for _, lk := range held {
			requireHeld(t, y, lk.Name())
			release(t, lk)
		}
	}},
	{"prefixes are apart", func(t *testing.T, b *bench) {
		x, y, n := b.locker(t, lock.WithPrefix("app1:")), b.locker(t, lock.WithPrefix("{app2}:")), b.name()
		one, two := acquire(t, x, n), acquire(t, y, n)
		requireHeld(t, b.locker(t, lock.WithPrefix("app1:")), n)
		release(t, one)
		release(t, two)
	}},
	{"MinHold keeps the name after the release", func(t *testing.T, b *bench) {
		x, y, n := b.locker(t, lock.WithMinHold(2*ttl)), b.locker(t), b.name()
		start := time.Now()
		require.NoError(t, x.Do(within(t), n, nothing))
		requireFree(t, y, n)
		require.GreaterOrEqual(t, time.Since(start), 2*ttl)
	}},
	{"MaxHold ends a section that hangs", func(t *testing.T, b *bench) {
		x, y, n := b.locker(t, lock.WithMaxHold(2*ttl)), b.locker(t), b.name()
		err := x.Do(within(t), n, func(ctx context.Context) error {
			requireEnd(t, ctx)
			requireFree(t, y, n)
			return nil
		})
		require.ErrorIs(t, err, lock.ErrLost)
	}},
	{"a counter kept under the lock ends exact", func(t *testing.T, b *bench) {
		n, counter := b.name(), 0
		var wg sync.WaitGroup
		for range 4 {
			l := b.locker(t, lock.WithTTL(10*time.Second))
			for range 4 {
				wg.Go(func() {
					for range 5 {
						err := l.Do(within(t), n, func(context.Context) error {
							read := counter
							runtime.Gosched()
							counter = read + 1
							return nil
						})
						if err != nil {
							t.Error(err)
						}
					}
				})
			}
		}
		wg.Wait()
		require.Equal(t, 80, counter)
	}},
	{"many names at once", func(t *testing.T, b *bench) {
		l, id := b.locker(t, lock.WithFencing(), lock.WithTTL(10*time.Second)), b.name()
		var wg sync.WaitGroup
		for i := range 200 {
			wg.Go(func() {
				n := fmt.Sprintf("%s:%d", id, i)
				err := l.Do(within(t), n, func(ctx context.Context) error {
					if lk, _ := lock.FromContext(ctx); lk.Fence() < 1 || lk.Fence() > 10 { // one more for each try that failed
						return fmt.Errorf("first fence %d: is the counter another's too?", lk.Fence())
					}
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}},
}

func nothing(context.Context) error { return nil }
