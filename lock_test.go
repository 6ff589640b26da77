package lock_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/internal/redistest"
)

func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(slog.DiscardHandler)) // losses are part of the tests, and so are failed dials
	redis.SetLogger(&logging.VoidLogger{})
	flag.Parse()
	_ = flag.Set("test.parallel", "8") // parallel tests wait for servers more than they work
	goleak.VerifyTestMain(mainFunc(func() int { return redistest.Main(m) }))
}

type mainFunc func() int

func (f mainFunc) Run() int { return f() }

// world is one Redis in virtual time: seen through a proxy that fails on demand, and directly.
type world struct {
	mini  *miniredis.Miniredis
	proxy *redistest.Proxy
	rdb   *redis.Client // through the proxy
	start time.Time
}

// inVirtualTime runs f in a bubble, once with each kind of client.
func inVirtualTime(t *testing.T, f func(t *testing.T, w *world)) {
	t.Helper()
	for _, inline := range []bool{false, true} {
		t.Run(fmt.Sprintf("ContextTimeoutEnabled=%v", inline), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { f(t, newWorld(t, inline)) })
		})
	}
}

func newWorld(t *testing.T, inline bool) *world {
	t.Helper()
	// After a client is closed go-redis still sleeps between two dials.
	t.Cleanup(func() { time.Sleep(10 * time.Second) })
	m := redistest.Mini(t)
	p := redistest.ProxyMini(t, m)
	rdb := p.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = inline })
	return &world{mini: m, proxy: p, rdb: rdb, start: time.Now()}
}

// locker returns a Locker through the proxy; the bubble does not end before all that it does in the background has.
func (w *world) locker(t *testing.T, opts ...lock.Option) *lock.Locker {
	t.Helper()
	l := lock.New(w.rdb, opts...)
	t.Cleanup(func() { settle(t, l) })
	return l
}

// direct returns a Locker that the proxy does not touch: another process.
func (w *world) direct(t *testing.T, opts ...lock.Option) *lock.Locker {
	t.Helper()
	l := lock.New(redistest.MiniClient(t, w.mini), opts...)
	t.Cleanup(func() { settle(t, l) })
	return l
}

func settle(t *testing.T, l *lock.Locker) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	require.NoError(t, l.Wait(ctx), "a lease or a clean-up is left")
}

func (w *world) elapsed() time.Duration { return time.Since(w.start) }

func acquire(t *testing.T, l *lock.Locker, name string) *lock.Lock {
	t.Helper()
	lk, err := l.Acquire(context.Background(), name)
	require.NoError(t, err)
	return lk
}

// released is the ordinary end of a test's lock.
func release(t *testing.T, lk *lock.Lock) {
	t.Helper()
	require.NoError(t, lk.Release(context.Background()))
}

const ttl = 10 * time.Second

// drift is the allowance that the package documents.
func drift(ttl time.Duration) time.Duration { return ttl/100 + 2*time.Millisecond }

func TestDoFollowsTheCallersContext(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		type key struct{}
		ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), key{}, "v"), time.Second)
		defer cancel()
		err := w.locker(t).Do(ctx, "n", func(ctx context.Context) error {
			require.Equal(t, "v", ctx.Value(key{}))
			deadline, ok := ctx.Deadline()
			require.True(t, ok)
			require.Equal(t, time.Second, deadline.Sub(w.start))
			<-ctx.Done()
			return context.Cause(ctx)
		})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NotErrorIs(t, err, lock.ErrLost, "the caller's own deadline is no loss")
		require.Equal(t, time.Second, w.elapsed())
		require.False(t, w.mini.Exists("lock:n"))
	})
}

func TestAcquiresContextBoundsTheWaitingOnly(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		type key struct{}
		ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), key{}, "v"), time.Second)
		lk, err := w.locker(t).Acquire(ctx, "n")
		require.NoError(t, err)
		cancel()
		time.Sleep(time.Hour)
		require.True(t, lk.Valid())
		require.NoError(t, lk.Context().Err())
		require.Equal(t, "v", lk.Context().Value(key{}))
		_, ok := lk.Context().Deadline()
		require.False(t, ok)
		require.NoError(t, lk.Release(ctx), "a dead context must not keep the lock")
		require.False(t, w.mini.Exists("lock:n"))
	})
}

func TestReleaseEndsTheContextBeforeAnythingIsSent(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		lk := acquire(t, l, "n")
		held := w.proxy.On(redistest.Any(), redistest.HoldRequest())
		start := time.Now()
		go func() { _ = lk.Release(context.Background()) }()
		<-lk.Context().Done()
		require.Zero(t, time.Since(start))
		require.Equal(t, lock.ErrReleased, context.Cause(lk.Context()))
		require.True(t, w.mini.Exists("lock:n"))
		synctest.Wait()
		held.Off()
	})
}

func TestWaitingEndsAtMaxWaitWithTheReason(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		lk := acquire(t, w.direct(t), "n")
		defer release(t, lk)
		l := w.locker(t, lock.WithMaxWait(2*time.Second))
		_, err := l.Acquire(t.Context(), "n")
		require.ErrorIs(t, err, lock.ErrHeld)
		require.NotErrorIs(t, err, context.DeadlineExceeded, "no context of the caller's has ended")
		require.InDelta(t, 2*time.Second, w.elapsed(), float64(time.Second/20))

		w.proxy.RefuseAll()
		w.proxy.Cut()
		synctest.Wait()
		_, err = l.Acquire(t.Context(), "n")
		require.Error(t, err)
		require.NotErrorIs(t, err, lock.ErrHeld, "an outage is no contention")
		var dial *net.OpError
		require.ErrorAs(t, err, &dial, "the client's error is there, also if a dial was cut off")
		if w.rdb.Options().ContextTimeoutEnabled {
			require.NotErrorIs(t, err, lock.ErrUnknown, "nothing was sent")
		}
		w.proxy.Heal()

		w.proxy.On(redistest.Cmd("SET", "EVALSHA", "EVAL"), redistest.SwallowReply())
		_, err = l.Acquire(t.Context(), "n")
		require.ErrorIs(t, err, lock.ErrUnknown)
		require.NotErrorIs(t, err, lock.ErrHeld)
		require.NotErrorIs(t, err, context.DeadlineExceeded)
	})
}

func TestMaxWaitDoesNotBoundTheWork(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		require.NoError(t, w.locker(t, lock.WithMaxWait(time.Second)).Do(t.Context(), "n", func(ctx context.Context) error {
			time.Sleep(time.Minute)
			return ctx.Err()
		}))
	})
}

func TestC04AWaiterLeavesAtOnceWhenItsContextEnds(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		lk := acquire(t, w.direct(t), "n")
		defer release(t, lk)
		ctx, cancel := context.WithCancelCause(t.Context())
		why := errors.New("why")
		done := make(chan error)
		go func() {
			_, err := w.locker(t).Acquire(ctx, "n")
			done <- err
		}()
		time.Sleep(5 * time.Second)
		synctest.Wait() // the waiter sleeps between two tries
		cancel(why)
		err := <-done
		require.Equal(t, 5*time.Second, w.elapsed())
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, err, why)
		require.ErrorIs(t, err, lock.ErrHeld)
	})
}

func TestWaitersPollNoMoreThanTheyHaveTo(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		lk := acquire(t, w.direct(t), "n")
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := w.locker(t).Acquire(ctx, "n")
		require.ErrorIs(t, err, lock.ErrHeld)
		release(t, lk)
		require.Less(t, w.proxy.Count(redistest.Any()), 60*9, "a pause is a fifth of a second on average")
	})
}

func TestTheLockOfACrashedHolderIsTakenWhenItExpires(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		require.NoError(t, w.mini.Set("lock:n", "someone"))
		w.mini.SetTTL("lock:n", 3*time.Second)
		lk := acquire(t, w.locker(t), "n")
		require.GreaterOrEqual(t, w.elapsed(), 3*time.Second)
		require.Less(t, w.elapsed(), 3*time.Second+5*time.Millisecond)
		release(t, lk)
	})
}

func TestC03ACommandEndsWithItsContextOnASilentNetwork(t *testing.T) {
	for _, c := range []struct {
		inline bool
		cancel bool
		max    time.Duration
	}{
		{false, false, 20 * time.Millisecond}, // the grace in which an answer may still come
		{false, true, 20 * time.Millisecond},
		{true, false, 0},          // deadlines are exact
		{true, true, time.Second}, // a bare cancellation is obeyed at the limit of a command
	} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { silentNetwork(t, c.inline, c.cancel, c.max, true) })
			synctest.Test(t, func(t *testing.T) { silentNetwork(t, c.inline, c.cancel, c.max, false) })
		})
	}
}

// silentNetwork answers nothing at all, or with connects set only no command of ours, so that each is certainly sent.
func silentNetwork(t *testing.T, inline, cancelled bool, late time.Duration, connects bool) {
	w := newWorld(t, inline)
	l := w.locker(t)
	lk := acquire(t, l, "held")
	end := func() (context.Context, context.CancelFunc) {
		if !cancelled {
			return context.WithTimeout(t.Context(), 100*time.Millisecond)
		}
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(100*time.Millisecond, cancel)
		return ctx, cancel
	}
	if connects {
		w.proxy.On(redistest.Cmd("SET", "EVALSHA", "EVAL"), redistest.SwallowReply())
	} else {
		w.proxy.Silence()
	}
	for op, call := range map[string]func(context.Context) error{
		"Acquire":    func(ctx context.Context) error { _, err := l.Acquire(ctx, "n"); return err },
		"TryAcquire": func(ctx context.Context) error { _, err := l.TryAcquire(ctx, "n"); return err },
		"Extend":     func(ctx context.Context) error { return lk.Extend(ctx, time.Minute) },
		"Release":    func(ctx context.Context) error { return lk.Release(ctx) },
	} {
		if op == "Extend" && errors.Is(context.Cause(lk.Context()), lock.ErrReleased) {
			continue // the order of a map is random
		}
		ctx, cancel := end()
		start := time.Now()
		err := call(ctx)
		cancel()
		require.ErrorIs(t, err, ctx.Err(), op)
		if connects {
			require.ErrorIs(t, err, lock.ErrUnknown, op)
		}
		require.NotErrorIs(t, err, lock.ErrHeld, op)
		require.LessOrEqual(t, time.Since(start), 100*time.Millisecond+late, op)
	}
	w.proxy.Heal()
	time.Sleep(ttl)
	require.False(t, w.mini.Exists("lock:n"), "what was left in flight is cleaned up")
	require.False(t, w.mini.Exists("lock:held"))
}

func TestNoLockIsReturnedWithADeadContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, false) // only this client stays for an answer after the end
		w.proxy.On(redistest.Cmd("SET"), redistest.DelayReply(110*time.Millisecond))
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		l := w.locker(t)
		lk, err := l.Acquire(ctx, "n")
		require.Equal(t, 110*time.Millisecond, w.elapsed(), "the answer came")
		require.Nil(t, lk)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NotErrorIs(t, err, lock.ErrHeld)
		settle(t, l)
		require.False(t, w.mini.Exists("lock:n"))
		require.Less(t, w.elapsed(), time.Second)
	})
}

func TestC20TheLockIsHeldUntilFnHasReturnedWhateverItsContextDoes(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		other := w.direct(t)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.NoError(t, w.locker(t).Do(ctx, "n", func(ctx context.Context) error {
			for range 10 { // fn does not listen
				time.Sleep(ttl)
				require.ErrorIs(t, other.TryDo(t.Context(), "n", func(context.Context) error { return nil }), lock.ErrHeld)
			}
			require.ErrorIs(t, ctx.Err(), context.DeadlineExceeded)
			return nil
		}))
		require.False(t, w.mini.Exists("lock:n"))
	})
}

func TestC01ADelayedSetIsCleanedUpAfterItHasLanded(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		w.proxy.On(redistest.Cmd("SET"), redistest.DelayRequest(3*time.Second)).Times(1)
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		l := w.locker(t)
		_, err := l.TryAcquire(ctx, "n")
		require.ErrorIs(t, err, lock.ErrUnknown)
		time.Sleep(3*time.Second - w.elapsed() + time.Millisecond)
		require.True(t, w.mini.Exists("lock:n"), "the orphan")
		settle(t, l)
		require.False(t, w.mini.Exists("lock:n"))
		require.Less(t, w.elapsed(), 6*time.Second, "well before the TTL has ended")
	})
}

func TestAReleasedLockIsFollowedUpIfAnAttemptMayLandLate(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		// The first SET is slow; the attempt is repeated, gets in first, and the lock is released before the SET lands.
		w.proxy.On(redistest.Cmd("SET"), redistest.DelayRequest(3*time.Second)).Times(1)
		l := w.locker(t)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		lk, err := l.Acquire(ctx, "n")
		require.NoError(t, err)
		require.Less(t, w.elapsed(), 2*time.Second)
		release(t, lk)
		time.Sleep(3*time.Second - w.elapsed() + time.Millisecond)
		require.True(t, w.mini.Exists("lock:n"), "the orphan")
		settle(t, l)
		require.False(t, w.mini.Exists("lock:n"))
		require.Less(t, w.elapsed(), 6*time.Second)
	})
}

func TestCleaningUpEndsWithTheTTL(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		w.proxy.On(redistest.Any(), redistest.Refuse()).Times(2)
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		l := w.locker(t)
		_, err := l.TryAcquire(ctx, "n")
		require.Error(t, err)
		settle(t, l)
		require.LessOrEqual(t, w.elapsed(), ttl+time.Second)
		n := w.proxy.Count(redistest.Cmd("EVALSHA"))
		require.Less(t, n, 15, "pauses grow")
		time.Sleep(time.Hour)
		require.Equal(t, n, w.proxy.Count(redistest.Cmd("EVALSHA")))
	})
}

func TestNoGrantIsReturnedTooLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.Mini(t)
		w := &world{mini: m, proxy: redistest.ProxyMini(t, m), start: time.Now()}
		w.rdb = w.proxy.Client(t, func(o *redis.Options) { o.ReadTimeout = time.Minute })
		w.proxy.On(redistest.Cmd("SET"), redistest.DelayReply(8*time.Second)).Times(1)
		lk, err := w.locker(t).TryAcquire(context.Background(), "n")
		require.NoError(t, err)
		require.Greater(t, time.Until(lk.Deadline()), ttl/2, "asked for again, and renewed by that")
		require.Less(t, time.Until(lk.Deadline()), m.TTL("lock:n"))
		release(t, lk)
	})
}

func TestC02TheClientsOwnRetriesAreOff(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		// A second SET would meet the first one's key, and its nil would read as "held by another".
		lost := w.proxy.On(redistest.Any(), redistest.DropReply()).Times(1)
		lk, err := w.locker(t).TryAcquire(t.Context(), "n")
		require.NoError(t, err)
		require.Equal(t, 1, lost.Hits())
		require.Equal(t, 1, w.proxy.Count(redistest.Cmd("SET")))
		w.proxy.On(redistest.Cmd("EVALSHA"), redistest.DropReply()).Times(1)
		n := w.proxy.Count(redistest.Cmd("EVALSHA", "EVAL"))
		release(t, lk)
		require.GreaterOrEqual(t, w.proxy.Count(redistest.Cmd("EVALSHA", "EVAL"))-n, 2, "ours are on")
	})
}

func TestMinHoldKeepsTheNameUntilExactlyThen(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t, lock.WithMinHold(time.Minute))
		lk := acquire(t, l, "n")
		time.Sleep(5 * time.Millisecond)
		release(t, lk)
		release(t, lk)
		require.False(t, lk.Valid())
		other := w.direct(t)
		time.Sleep(time.Minute - w.elapsed() - time.Millisecond)
		_, err := other.TryAcquire(t.Context(), "n")
		require.ErrorIs(t, err, lock.ErrHeld)
		time.Sleep(3 * time.Millisecond)
		next, err := other.TryAcquire(t.Context(), "n")
		require.NoError(t, err)
		release(t, next)
	})
}

func TestMinHoldThatIsOverKeepsNothing(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		lk := acquire(t, w.locker(t, lock.WithMinHold(time.Minute)), "n")
		time.Sleep(time.Minute)
		release(t, lk)
		require.False(t, w.mini.Exists("lock:n"))
	})
}

func TestALateRenewalDoesNotProlongMinHold(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		lk := acquire(t, w.locker(t, lock.WithMinHold(5*time.Second)), "n")
		slow := w.proxy.On(redistest.Cmd("EVALSHA"), redistest.HoldRequest()).Times(1)
		<-slow.Hit(1) // the first renewal is on its way
		release(t, lk)
		slow.Release()
		synctest.Wait()
		require.Positive(t, w.mini.TTL("lock:n"))
		require.LessOrEqual(t, w.mini.TTL("lock:n"), 5*time.Second-w.elapsed()+2*time.Millisecond)
	})
}

func TestC33ReentryIsRefusedAtOnce(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		twin := lock.New(w.rdb, lock.WithTTL(time.Second))
		none := func(context.Context) error { return errors.New("ran") }
		err := l.Do(t.Context(), "a", func(ctx context.Context) error {
			return l.Do(ctx, "b", func(ctx context.Context) error {
				ctx, cancel := context.WithCancel(ctx)
				defer cancel()
				for _, locker := range []*lock.Locker{l, l.With(lock.WithFencing()), twin} {
					require.ErrorIs(t, locker.Do(ctx, "a", none), lock.ErrReentrant)
					require.ErrorIs(t, locker.TryDo(ctx, "b", none), lock.ErrReentrant)
					_, err := locker.Acquire(ctx, "a")
					require.ErrorIs(t, err, lock.ErrReentrant)
				}
				require.EqualError(t, l.With(lock.WithPrefix("p:")).Do(ctx, "a", none), "ran")
				require.EqualError(t, l.Do(ctx, "c", none), "ran")
				lk, ok := lock.FromContext(ctx)
				require.True(t, ok)
				require.Equal(t, "b", lk.Name())
				release(t, lk)
				require.EqualError(t, l.Do(context.WithoutCancel(ctx), "b", none), "ran", "it is not held any more")
				return nil
			})
		})
		require.NoError(t, err, "an early release is no loss")
		require.Zero(t, w.elapsed())
		_, ok := lock.FromContext(t.Context())
		require.False(t, ok)
	})
}

func TestC13ConcurrentReleasesShareOneDelete(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		lk := acquire(t, w.locker(t), "n")
		w.proxy.Latency(100 * time.Millisecond)
		before := w.proxy.Count(redistest.Cmd("EVALSHA"))
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() { require.NoError(t, lk.Release(context.Background())) })
		}
		wg.Wait()
		require.Equal(t, 1, w.proxy.Count(redistest.Cmd("EVALSHA"))-before)
	})
}

func TestAReleaseOfUnknownOutcomeCanBeRepeated(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		lk := acquire(t, w.locker(t), "n")
		w.proxy.Silence()
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		err := lk.Release(ctx)
		require.ErrorIs(t, err, lock.ErrUnknown)
		require.NotErrorIs(t, err, lock.ErrLost)
		w.proxy.Heal()
		require.NoError(t, lk.Release(t.Context()))
		require.NoError(t, lk.Release(t.Context()), "the first definite outcome is remembered")
		require.False(t, w.mini.Exists("lock:n"))
	})
}

func TestAReleaseThatFailsGoesOnInTheBackground(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		lk := acquire(t, w.locker(t), "n")
		w.proxy.RefuseAll()
		w.proxy.Cut()
		synctest.Wait()
		err := lk.Release(context.Background())
		require.Error(t, err)
		if w.rdb.Options().ContextTimeoutEnabled {
			require.NotErrorIs(t, err, lock.ErrUnknown, "nothing was sent")
		}
		require.NotErrorIs(t, err, lock.ErrLost)
		require.Less(t, w.elapsed(), 3*time.Second)
		w.proxy.Heal()
		time.Sleep(3 * time.Second)
		require.False(t, w.mini.Exists("lock:n"))
		require.Less(t, w.elapsed(), ttl-2*time.Second)
	})
}

func TestDoTellsALossAndKeepsFnsError(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		own := errors.New("own")
		for _, err := range []error{own, nil} {
			got := w.locker(t).Do(t.Context(), "n", func(ctx context.Context) error {
				w.mini.Del("lock:n")
				<-ctx.Done()
				require.ErrorIs(t, context.Cause(ctx), lock.ErrLost)
				return err
			})
			require.ErrorIs(t, got, lock.ErrLost)
			if err != nil {
				require.ErrorIs(t, got, own)
			}
		}
		got := w.locker(t).Do(t.Context(), "n", func(ctx context.Context) error {
			w.mini.Del("lock:n")
			return own // before anyone could notice
		})
		require.ErrorIs(t, got, lock.ErrLost)
		require.ErrorIs(t, got, own)
	})
}

func TestDoLogsAReleaseThatFailed(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		var log bytes.Buffer
		l := w.locker(t, lock.WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
		require.NoError(t, l.Do(t.Context(), "n", func(context.Context) error {
			w.proxy.RefuseAll()
			return nil
		}))
		require.Contains(t, log.String(), "release failed")
		w.proxy.Heal()
	})
}

func TestThePackageLevelFunctionsFailClosedWithoutADefault(t *testing.T) {
	err := lock.Do(t.Context(), "n", func(context.Context) error { panic("ran") })
	require.ErrorIs(t, err, lock.ErrNoDefault)
	err = lock.TryDo(t.Context(), "n", func(context.Context) error { panic("ran") })
	require.ErrorIs(t, err, lock.ErrNoDefault)
	require.NotErrorIs(t, err, lock.ErrHeld)
	require.Panics(t, func() { lock.SetDefault(nil) })
}

func TestSetDefaultServesThePackageLevelFunctions(t *testing.T) {
	before := lock.Default()
	defer lock.SetDefault(before)
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		lock.SetDefault(l)
		require.Same(t, l, lock.Default())
		require.NoError(t, lock.Do(t.Context(), "n", func(ctx context.Context) error {
			require.True(t, w.mini.Exists("lock:n"))
			return lock.TryDo(ctx, "m", func(context.Context) error { return nil })
		}))
	})
}

func TestAVariantSharesTheWatchdogAndKeepsItsOwnOptions(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		v := l.With(lock.WithTTL(time.Second), lock.WithPrefix("p:"))
		lk := acquire(t, v, "n")
		require.InDelta(t, time.Second, w.mini.TTL("p:lock:n"), float64(50*time.Millisecond))
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.ErrorIs(t, l.Wait(ctx), context.DeadlineExceeded, "Wait sees the leases of variants")
		release(t, lk)
		require.NoError(t, l.Wait(t.Context()))
	})
}

func TestInvalidOptionsPanic(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer rdb.Close()
	for _, opt := range []lock.Option{
		lock.WithTTL(0), lock.WithTTL(9 * time.Millisecond), lock.WithTTL(1<<63 - 1), lock.WithPrefix("{"),
		lock.WithMaxWait(-1), lock.WithMaxHold(-1), lock.WithMinHold(-1),
	} {
		require.Panics(t, func() { lock.New(rdb, opt) })
		require.Panics(t, func() { lock.New(rdb).With(opt) })
	}
	require.Panics(t, func() { lock.NewWithStore(nil) })
	require.NotPanics(t, func() { lock.New(rdb, lock.WithLogger(nil), lock.WithTTL(10*time.Millisecond)) })
}

func TestAcquireAndReleaseAllocateNoMoreThanTheRawCommands(t *testing.T) {
	if redistest.Race {
		return // what the race detector allocates does not count; CI runs this test without it as well
	}
	server := redistest.Shared(t, redistest.Redis7)
	rdb := server.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	script := redis.NewScript(`if redis.call("get", KEYS[1]) == ARGV[1] then return redis.call("del", KEYS[1]) end return 0`)
	var failed error
	raw := testing.AllocsPerRun(500, func() {
		token := uuid.NewString()
		if err := rdb.SetNX(ctx, "lock:raw", token, ttl).Err(); err != nil {
			failed = err
		}
		if err := script.Run(ctx, rdb, []string{"lock:raw"}, token).Err(); err != nil {
			failed = err
		}
	})
	l := lock.New(rdb)
	ours := testing.AllocsPerRun(500, func() {
		lk, err := l.Acquire(ctx, "allocs")
		if err == nil {
			err = lk.Release(ctx)
		}
		if err != nil {
			failed = err
		}
	})
	require.NoError(t, failed)
	require.LessOrEqual(t, ours, raw)
	require.LessOrEqual(t, ours, 17.0, "what was reached once is not to be lost")
}

func TestHoldingALockCostsNoGoroutine(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		release(t, acquire(t, l, "warm"))
		synctest.Wait()
		before := runtime.NumGoroutine()
		var held []*lock.Lock
		for i := range 100 {
			held = append(held, acquire(t, l, fmt.Sprint(i)))
		}
		time.Sleep(ttl / 6) // between the acquires and the first renewals
		synctest.Wait()
		require.LessOrEqual(t, runtime.NumGoroutine(), before)
		for _, lk := range held {
			release(t, lk)
		}
	})
}

func TestErrorsNameWhatFailed(t *testing.T) {
	_, err := lock.Default().Acquire(t.Context(), "")
	var e *lock.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, "acquire", e.Op)
	require.EqualError(t, err, `lock: acquire "": empty name`)
	require.EqualError(t, lock.Do(t.Context(), "n", nil), `lock: do "n": nil function`)
}
