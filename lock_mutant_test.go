package lock_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/internal/redistest"
)

// The rules in this file were found by breaking them: integration/mutants has the variants that nothing else noticed.

// A second and more lie between the two tries: far more than the drift that a deadline leaves.
func TestAGrantThatALateRetryFoundIsNotTrustedBeyondTheKeysExpiry(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		for i, opts := range [][]lock.Option{nil, {lock.WithFencing()}} {
			name := fmt.Sprint(i)
			l := w.locker(t, opts...)
			release(t, acquire(t, l, name)) // now the server knows the scripts
			silent := w.proxy.On(redistest.Cmd("SET", "EVALSHA"), redistest.SwallowReply()).Times(1)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			start := time.Now()
			lk, err := l.Acquire(ctx, name)
			require.NoError(t, err)
			require.Equal(t, 1, silent.Hits())
			require.GreaterOrEqual(t, time.Since(start), time.Second)
			require.Greater(t, time.Until(lk.Deadline()), ttl/2)
			require.Less(t, time.Until(lk.Deadline()), w.mini.TTL("lock:"+name))
			release(t, lk)
		}
	})
}

func TestALateCopyOfAnAcquireShortensNothing(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t, lock.WithFencing())
		release(t, acquire(t, l, "n"))
		late := w.proxy.On(redistest.Cmd("EVALSHA"), redistest.HoldRequest()).Times(1)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		lk, err := l.Acquire(ctx, "n") // by its second try
		require.NoError(t, err)
		require.Equal(t, 1, late.Hits())
		require.NoError(t, lk.Extend(t.Context(), time.Hour))
		late.Release()
		synctest.Wait()
		require.Equal(t, time.Hour, w.mini.TTL("lock:n"))
		release(t, lk)
	})
}

func TestALateCopyOfAProlongationShortensNothing(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t, lock.WithFencing())
		lk := acquire(t, l, "n")
		late := w.proxy.On(func(args []string) bool { return redistest.Cmd("EVALSHA", "EVAL")(args) && len(args) == 10 },
			redistest.HoldRequest()).Times(1)
		next := wait(t, l, "n") // fences are reserved for it
		<-late.Hit(1)
		require.NoError(t, lk.Extend(t.Context(), time.Hour))
		late.Release()
		synctest.Wait()
		require.Equal(t, time.Hour, w.mini.TTL("lock:n"))
		next.cancel()
		<-next.result
		release(t, lk)
	})
}

// Each command of an acquire is held up in turn, and another process gets the lock and gives it up meanwhile.
func TestAFenceIsCountedTogetherWithTheGrant(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		slow, quick := w.locker(t, lock.WithFencing()), w.direct(t, lock.WithFencing())
		release(t, acquire(t, slow, "warm"))
		for n := 0; ; n++ {
			name := fmt.Sprint(n)
			held := w.proxy.On(redistest.Any(), redistest.HoldRequest()).Skip(n).Times(1)
			waiter := wait(t, slow, name)
			if waiter.served() {
				held.Off()
				release(t, waiter.lock(t))
				require.Positive(t, n)
				break
			}
			before := acquire(t, quick, name)
			release(t, before)
			held.Off()
			lk := waiter.lock(t)
			require.Greater(t, lk.Fence(), before.Fence(), "command %d", n)
			release(t, lk)
		}
	})
}

func TestALateDeleteOfOneLeaseLeavesTheNextAlone(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		release(t, acquire(t, l, "n"))
		lk := acquire(t, l, "n")
		late := w.proxy.On(redistest.Cmd("EVALSHA"), redistest.HoldRequest()).Times(1)
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, lk.Release(ctx), lock.ErrUnknown)
		next := acquire(t, l, "n") // the delete was sent again in the background
		require.Equal(t, 1, late.Hits())
		late.Release()
		synctest.Wait()
		require.True(t, w.mini.Exists("lock:n"))
		release(t, next)
	})
}

// Between a third and a quarter of the TTL is left: enough for a waiter to begin something, but not to pass it on.
func TestALeaseWithLittleLeftIsNotPassedOn(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t, lock.WithTTL(time.Second)) // shorter than a run may be
		lk := acquire(t, l, "n")
		next := wait(t, l, "n")
		w.proxy.Silence()
		time.Sleep(time.Until(lk.Deadline()) - 3*time.Second/10)
		w.proxy.Cut()
		w.proxy.Heal()
		release(t, lk)
		got := next.lock(t)
		require.False(t, lock.SameLease(lk, got))
		release(t, got)
	})
}

// The machine was suspended for longer than the lease lasts, so the alarm is still to come.
func TestALeaseThatIsOverIsNotPassedOn(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		lk := acquire(t, l, "n")
		next := wait(t, l, "n")
		lock.Suspend(lk, ttl)
		err := lk.Release(t.Context())
		got := next.lock(t)
		require.True(t, got.Valid())
		require.False(t, lock.SameLease(lk, got))
		require.ErrorIs(t, err, lock.ErrLost, "and is not reported as released")
		release(t, got)
	})
}

// lateEars is a Store whose own messages take a while: so who begins to listen hears of what was before.
type lateEars struct {
	lock.Store
	late time.Duration

	mu   sync.Mutex // guards ears
	ears map[*func(string)]bool
}

func (s *lateEars) Listen(_ context.Context, _ lock.Key, wake func(string)) (func(), error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ears[&wake] = true
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.ears, &wake)
	}, nil
}

func (s *lateEars) Release(ctx context.Context, r lock.Request) (lock.Reply, error) {
	time.AfterFunc(s.late, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		for ear := range s.ears {
			(*ear)(r.From)
		}
	})
	return s.Store.Release(ctx, r)
}

// After a release that another process hears of, those who wait in this one and those who come next stand back for two
// milliseconds. The other's try takes one and a half, and the process's own message comes before it.
func TestAProcessStandsBackAndIsNotWokenByItsOwnRelease(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		w.proxy.Latency(time.Millisecond)
		l := lock.NewWithStore(&lateEars{
			Store: lock.NewStore(redistest.MiniClient(t, w.mini)), late: 500 * time.Microsecond, ears: map[*func(string)]bool{},
		})
		for _, name := range []string{"in line", "newcomer"} {
			lk := acquire(t, l, name)
			foreign := wait(t, w.locker(t), name)
			time.Sleep(100 * time.Millisecond) // it listens
			var own *waiter
			if name == "in line" {
				own = wait(t, l.With(lock.WithTTL(time.Minute)), name) // of another kind: the release is a true one
				release(t, lk)
			} else {
				release(t, lk)
				own = wait(t, l, name)
			}
			time.Sleep(10 * time.Millisecond)
			first, second := foreign, own
			if own.served() {
				first, second = own, foreign
			}
			release(t, first.lock(t))
			release(t, second.lock(t))
			require.Same(t, foreign, first, "%s: the process did not stand back", name)
		}
		settle(t, l)
	})
}
