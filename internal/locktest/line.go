package locktest

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
)

// lineTests are about those who wait, in one process and in several.
var lineTests = []test{
	{"those who wait take turns, with rising fences", func(t *testing.T, b *bench) {
		n := b.name()
		var held bool
		var last lock.Fence
		var wg sync.WaitGroup
		for range 3 {
			l := b.locker(t, lock.WithFencing())
			for range 8 {
				wg.Go(func() {
					for range 10 {
						lk, err := l.Acquire(within(t), n)
						if err != nil {
							t.Error(err)
							return
						}
						if held {
							t.Error("two holders")
						}
						held = true
						if lk.Fence() <= last {
							t.Errorf("fence %d after %d", lk.Fence(), last)
						}
						last, held = lk.Fence(), false
						if err := lk.Release(within(t)); err != nil {
							t.Error(err)
						}
					}
				})
			}
		}
		wg.Wait()
		require.GreaterOrEqual(t, last, lock.Fence(240))
	}},
	{"a lost lease is the holder's loss, and the line goes on", func(t *testing.T, b *bench) {
		l, n := b.locker(t, lock.WithFencing()), b.name()
		held := acquire(t, l, n)
		const waiters = 4
		served := make(chan *lock.Lock)
		for range waiters {
			go func() {
				lk, err := l.Acquire(within(t), n)
				if err != nil {
					t.Error(err)
				}
				served <- lk
			}()
		}
		for i := range waiters {
			if i%2 == 0 {
				b.Delete(t, n)
				require.ErrorIs(t, requireEnd(t, held.Context()), lock.ErrLost)
			} else {
				release(t, held)
			}
			next := <-served
			require.Greater(t, next.Fence(), held.Fence())
			held = next
		}
		release(t, held)
	}},
	{"variants wait in one line", func(t *testing.T, b *bench) {
		l, n := b.locker(t), b.name()
		variants := []*lock.Locker{l, l.With(lock.WithFencing()), l.With(lock.WithTTL(10 * ttl)), l.With(lock.WithMaxHandoffs(0))}
		count := 0
		var wg sync.WaitGroup
		for _, v := range variants {
			for range 4 {
				wg.Go(func() {
					for range 5 {
						lk, err := v.Acquire(within(t), n)
						if err != nil {
							t.Error(err)
							return
						}
						count++
						if err := lk.Release(within(t)); err != nil {
							t.Error(err)
						}
					}
				})
			}
		}
		wg.Wait()
		require.Equal(t, 80, count)
	}},
}
