package lock_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/internal/redistest"
)

const outOfMemory = "OOM command not allowed when used memory > 'maxmemory'."

func TestATryThatMayHaveWorkedIsNotForgottenWhenTheNextIsRefused(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		w.proxy.On(redistest.Cmd("SET"), redistest.DropReply()).Times(1)
		refused := w.proxy.On(redistest.Cmd("EVALSHA", "EVAL"), redistest.ReplyError(outOfMemory))
		_, err := l.TryAcquire(t.Context(), "n")
		require.ErrorIs(t, err, lock.ErrUnknown)
		require.ErrorContains(t, err, "OOM")
		refused.Off()
		settle(t, l)
		require.False(t, w.mini.Exists("lock:n"))

		lk := acquire(t, l, "n")
		w.proxy.On(redistest.Cmd("EVALSHA"), redistest.DropReply()).Times(1)
		readOnly := w.proxy.On(redistest.Cmd("EVALSHA"), redistest.ReplyError("READONLY You can't write"))
		err = lk.Extend(t.Context(), time.Minute)
		require.ErrorIs(t, err, lock.ErrUnknown)
		require.ErrorContains(t, err, "READONLY")
		readOnly.Off()

		w.proxy.On(redistest.Cmd("EVALSHA"), redistest.DropReply()).Times(1)
		readOnly = w.proxy.On(redistest.Cmd("EVALSHA"), redistest.ReplyError("READONLY You can't write"))
		err = lk.Release(t.Context())
		require.ErrorIs(t, err, lock.ErrUnknown)
		require.ErrorContains(t, err, "READONLY")
		readOnly.Off()
		require.NoError(t, lk.Release(t.Context()))
	})
}

func TestCleaningUpLastsAsLongAsAnExtendedKey(t *testing.T) {
	for _, extended := range []bool{true, false} { // or it may have been: the reply was lost
		inVirtualTime(t, func(t *testing.T, w *world) {
			l := w.locker(t)
			lk := acquire(t, l, "n")
			require.NoError(t, lk.Extend(t.Context(), ttl)) // the server knows the script
			if !extended {
				w.proxy.On(redistest.Arg("3600000"), redistest.DropReply())
			}
			err := lk.Extend(t.Context(), time.Hour)
			require.Equal(t, extended, err == nil)
			w.proxy.RefuseAll()
			w.proxy.Cut()
			require.Error(t, lk.Release(t.Context()))
			time.Sleep(10 * time.Minute)
			w.proxy.Heal()
			settle(t, l)
			require.False(t, w.mini.Exists("lock:n"))
		})
	}
}

func TestAStrayIsFollowedUpAlsoWhenTheLockWasGone(t *testing.T) {
	for _, told := range []bool{true, false} { // that it is gone, before the release
		inVirtualTime(t, func(t *testing.T, w *world) {
			l := w.locker(t)
			w.proxy.On(redistest.Cmd("SET"), redistest.DelayRequest(6*time.Second)).Times(1)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			lk, err := l.Acquire(ctx, "n") // by its second try, after a second
			require.NoError(t, err)
			w.mini.Del("lock:n")
			if told {
				<-lk.Context().Done()
			}
			require.ErrorIs(t, lk.Release(t.Context()), lock.ErrLost)
			settle(t, l)
			require.Greater(t, w.elapsed(), 6*time.Second)
			require.False(t, w.mini.Exists("lock:n"), "the first SET has landed by now")
		})
	}
}

func TestAWrongPasswordIsToldAtOnce(t *testing.T) {
	server := redistest.Start(t, redistest.Redis7, "--requirepass", "secret")
	for _, inline := range []bool{false, true} {
		rdb := server.Client(t, func(o *redis.Options) { o.Password, o.ContextTimeoutEnabled = "wrong", inline })
		_, err := lock.New(rdb).Acquire(t.Context(), "n") // returns although its context never ends
		require.ErrorContains(t, err, "WRONGPASS")
		require.NotErrorIs(t, err, lock.ErrUnknown)
	}
}

func TestARefusedConnectionIsNoLoss(t *testing.T) {
	server := redistest.Start(t, redistest.Redis7)
	admin := server.Client(t)
	for _, inline := range []bool{false, true} {
		rdb := server.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = inline })
		l := lock.New(rdb)
		lk := acquire(t, l, "n")
		require.NoError(t, admin.ConfigSet(t.Context(), "requirepass", "rotated").Err())
		require.NoError(t, admin.Do(t.Context(), "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes").Err())
		err := lk.Extend(t.Context(), time.Minute)
		require.Error(t, err)
		require.NotErrorIs(t, err, lock.ErrLost)
		require.True(t, lk.Valid())
		require.NoError(t, admin.ConfigSet(t.Context(), "requirepass", "").Err())
		require.NoError(t, lk.Extend(t.Context(), time.Minute))
		release(t, lk)
	}
}

func TestReleaseIsBoundedOnASilentNetwork(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		lk := acquire(t, w.locker(t), "n")
		w.proxy.Silence()
		start := time.Now()
		require.Error(t, lk.Release(ctx))
		require.LessOrEqual(t, time.Since(start), 3*time.Second)
		w.proxy.Heal()
	})
}

func TestAnAnswerLaterThanASecondRenewsToo(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		lk := acquire(t, w.locker(t), "n")
		w.proxy.On(redistest.Cmd("EVALSHA", "EVAL"), redistest.DelayReply(1200*time.Millisecond))
		time.Sleep(time.Minute)
		require.True(t, lk.Valid())
		_ = lk.Release(t.Context())
	})
}

func TestALogHandlerThatHangsCostsNoOtherLease(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		hang := make(chan struct{})
		l := w.locker(t, lock.WithLogger(slog.New(handler{slog.DiscardHandler, func() { <-hang }})))
		gone := acquire(t, l, "gone")
		kept := []*lock.Lock{acquire(t, l, "a"), acquire(t, l, "b")}
		w.mini.Del("lock:gone")
		time.Sleep(5 * ttl)
		require.False(t, gone.Valid())
		for _, lk := range kept {
			require.True(t, lk.Valid())
			release(t, lk)
		}
		close(hang)
	})
}

func TestASuspendedMachineHasLostItsLeases(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		for what, during := range map[string]func(){
			"the key is gone":       func() { w.mini.FastForward(ttl) },
			"the server says not":   w.proxy.Silence,
			"it can not be reached": func() { w.proxy.RefuseAll(); w.proxy.Cut() },
		} {
			err := l.Do(t.Context(), what, func(ctx context.Context) error {
				lk, _ := lock.FromContext(ctx)
				lock.Suspend(lk, ttl)
				during()
				return nil
			})
			require.ErrorIs(t, err, lock.ErrLost, "the section may not have been exclusive to its end: %s", what)
			w.proxy.Heal()
		}
		require.NoError(t, l.Do(t.Context(), "n", func(ctx context.Context) error {
			lk, _ := lock.FromContext(ctx)
			lock.Suspend(lk, ttl)
			return nil
		}), "the server says that nobody else can have been there")

		lk := acquire(t, l, "extended")
		require.NoError(t, lk.Extend(t.Context(), time.Hour))
		time.Sleep(time.Minute)
		lock.Suspend(lk, time.Hour)
		require.False(t, lk.Valid())
		time.Sleep(ttl) // for renewals
		require.False(t, lk.Valid(), "no renewal revives it")
		_ = lk.Release(t.Context())
	})
}

func TestAStoreThatPanicsLeavesReleaseUsable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &panicking{Store: lock.NewStore(redistest.MiniClient(t, redistest.Mini(t)))}
		l := lock.NewWithStore(s)
		lk := acquire(t, l, "n")
		s.panics = true
		require.Panics(t, func() { _ = lk.Release(t.Context()) })
		s.panics = false
		release(t, lk)
		settle(t, l)
	})
}

type panicking struct {
	lock.Store
	panics bool
}

func (p *panicking) Acquire(ctx context.Context, r lock.Request) (lock.Reply, error) {
	if p.panics {
		panic(errors.New("as a hook may"))
	}
	return p.Store.Acquire(ctx, r)
}

func (p *panicking) Release(ctx context.Context, r lock.Request) (lock.Reply, error) {
	if p.panics {
		panic(errors.New("as a hook may"))
	}
	return p.Store.Release(ctx, r)
}

// The machine slept for an hour, another has had the lock meanwhile. The first delete's answer is lost, the second finds nothing.
func TestASuspensionIsALossAlsoIfAnAnswerIsLost(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		lk := acquire(t, l, "n")
		lock.Suspend(lk, time.Hour)
		w.mini.Set("lock:n", "another") // the lease ran out while the machine slept
		w.proxy.On(redistest.Cmd("evalsha", "eval"), redistest.DropReply()).Times(1)
		err := lk.Release(t.Context())
		require.ErrorIs(t, err, lock.ErrLost)
	})
}

func TestDoTellsOfASuspensionAlsoIfAnAnswerIsLost(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		err := l.Do(t.Context(), "n", func(ctx context.Context) error {
			lk, _ := lock.FromContext(ctx)
			lock.Suspend(lk, time.Hour)
			w.mini.Set("lock:n", "another")
			w.proxy.On(redistest.Cmd("evalsha", "eval"), redistest.DropReply()).Times(1)
			return nil
		})
		require.ErrorIs(t, err, lock.ErrLost)
	})
}

// The same, where the answer comes after the deadline on the monotonic clock.
func TestASuspensionIsALossAlsoIfTheAnswerComesLate(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t, lock.WithMaxHold(ttl)) // no renewal
		lk := acquire(t, l, "n")
		time.Sleep(time.Until(lk.Deadline()) - 10*time.Millisecond)
		lock.Suspend(lk, time.Hour)
		w.mini.Set("lock:n", "another")
		w.proxy.On(redistest.Cmd("evalsha", "eval"), redistest.DelayReply(100*time.Millisecond)).Times(1)
		err := lk.Release(t.Context())
		require.ErrorIs(t, err, lock.ErrLost)
	})
}
