package lock_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/internal/redistest"
)

// waiter is a goroutine that waits for a lock.
type waiter struct {
	ctx    context.Context
	cancel context.CancelFunc
	result chan *lock.Lock // nil when it has failed
	err    error
}

// wait starts a waiter, and returns when it waits.
func wait(t *testing.T, l *lock.Locker, name string) *waiter {
	t.Helper()
	w := &waiter{result: make(chan *lock.Lock, 1)}
	w.ctx, w.cancel = context.WithCancel(t.Context())
	t.Cleanup(w.cancel)
	go func() {
		var lk *lock.Lock
		lk, w.err = l.Acquire(w.ctx, name)
		w.result <- lk
	}()
	synctest.Wait()
	return w
}

func line(t *testing.T, l *lock.Locker, name string, n int) []*waiter {
	t.Helper()
	ws := make([]*waiter, n)
	for i := range ws {
		ws[i] = wait(t, l, name)
	}
	return ws
}

// served tells whether the waiter has its result.
func (w *waiter) served() bool { return len(w.result) > 0 }

func (w *waiter) lock(t *testing.T) *lock.Lock {
	t.Helper()
	lk := <-w.result
	require.NoError(t, w.err)
	return lk
}

// commands returns how many of ours have been sent, without those about subscriptions.
func (w *world) commands() int { return w.proxy.Count(redistest.Cmd("SET", "EVAL", "EVALSHA")) }

func TestWaitersAreServedInTheOrderInWhichTheyCame(t *testing.T) {
	for _, opts := range [][]lock.Option{nil, {lock.WithFencing()}, {lock.WithMaxHandoffs(0)}, {lock.WithFencing(), lock.WithMaxHandoffs(3)}} {
		inVirtualTime(t, func(t *testing.T, w *world) {
			l := w.locker(t, opts...)
			held := acquire(t, l, "n")
			ws := line(t, l, "n", 64)
			var last lock.Fence
			for i, waiter := range ws {
				require.False(t, waiter.served(), "%d has to wait", i)
				release(t, held)
				require.Equal(t, lock.ErrReleased, context.Cause(held.Context()))
				held = waiter.lock(t)
				if held.Fence() != 0 {
					require.Greater(t, held.Fence(), last)
				}
				last = held.Fence()
				require.True(t, held.Valid())
			}
			release(t, held)
		})
	}
}

func TestAWaiterLeavesFromAnyPlaceAndTheOthersKeepTheirs(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		for range 20 {
			l := w.locker(t)
			elsewhere := acquire(t, w.direct(t), "n")
			ws := line(t, l, "n", 9)
			left := map[int]bool{}
			for _, i := range rand.Perm(9)[:5] {
				left[i] = true
				ws[i].cancel()
				if i%2 == 0 {
					synctest.Wait()
				}
			}
			synctest.Wait()
			for i := range left {
				require.True(t, ws[i].served(), "at once")
				require.Nil(t, <-ws[i].result)
				require.ErrorIs(t, ws[i].err, context.Canceled)
			}
			release(t, elsewhere)
			for i, waiter := range ws {
				if !left[i] {
					release(t, waiter.lock(t))
				}
			}
			settle(t, l)
		}
	})
}

// A waiter that is cancelled at the moment in which it is served gets the lock or passes it on: it never swallows it.
func TestACancelledWaiterSwallowsNothing(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		for i := range 200 {
			held := acquire(t, l, "n")
			first, second := wait(t, l, "n"), wait(t, l, "n")
			var wg sync.WaitGroup
			wg.Go(first.cancel)
			wg.Go(func() { _ = held.Release(context.Background()) })
			wg.Wait()
			if i%2 == 0 {
				second.cancel()
			}
			for _, waiter := range []*waiter{first, second} {
				if lk := <-waiter.result; lk != nil {
					require.NoError(t, lk.Release(context.Background()))
				}
			}
			if i%2 == 1 {
				require.NoError(t, second.err)
			}
		}
		settle(t, l)
		require.False(t, w.mini.Exists("lock:n"))
	})
}

func TestAHeadThatIsCancelledLeavesItsAttemptToTheNext(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		release(t, acquire(t, l, "n"))
		slow := w.proxy.On(redistest.Cmd("SET"), redistest.DelayReply(500*time.Millisecond)).Times(1)
		head := wait(t, l, "n")
		<-slow.Hit(1)
		next := wait(t, l, "n")
		token, _ := w.mini.Get("lock:n")
		n := w.commands()
		head.cancel()
		lk := next.lock(t)
		require.ErrorIs(t, func() error { <-head.result; return head.err }(), context.Canceled)
		now, _ := w.mini.Get("lock:n")
		require.Equal(t, token, now, "no delete was sent for the token, and it is used")
		require.LessOrEqual(t, w.commands()-n, 2)
		time.Sleep(time.Minute)
		require.True(t, lk.Valid())
		release(t, lk)
	})
}

func TestAnAttemptOfAnotherKindIsNotGoneOnWith(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		fenced := l.With(lock.WithFencing(), lock.WithTTL(time.Minute))
		slow := w.proxy.On(redistest.Cmd("SET"), redistest.DelayReply(500*time.Millisecond)).Times(1)
		head := wait(t, l, "n")
		<-slow.Hit(1)
		next := wait(t, fenced, "n")
		token, _ := w.mini.Get("lock:n")
		head.cancel()
		lk := next.lock(t)
		now, _ := w.mini.Get("lock:n")
		require.NotEqual(t, token, now)
		require.Equal(t, lock.Fence(1), lk.Fence())
		release(t, lk)
	})
}

func TestALockIsPassedOnWithoutACommand(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		for _, opts := range [][]lock.Option{nil, {lock.WithFencing()}} {
			l := w.locker(t, opts...)
			held := acquire(t, l, "n")
			ws := line(t, l, "n", 8)
			synctest.Wait() // for the reservation
			token, _ := w.mini.Get("lock:n")
			n := w.commands()
			for _, waiter := range ws[:7] {
				release(t, held)
				held = waiter.lock(t)
			}
			require.Equal(t, n, w.commands())
			now, _ := w.mini.Get("lock:n")
			require.Equal(t, token, now)
			release(t, held)
			release(t, ws[7].lock(t))
			require.False(t, w.mini.Exists("lock:n"))
		}
	})
}

func TestAGrantThatWasPassedOnCanDoNothingMore(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t, lock.WithFencing())
		old := acquire(t, l, "n")
		next := wait(t, l, "n")
		synctest.Wait()
		deadline := old.Deadline()
		release(t, old)
		lk := next.lock(t)
		require.False(t, old.Valid())
		require.ErrorIs(t, old.Extend(t.Context(), time.Hour), lock.ErrReleased)
		require.NoError(t, old.Release(t.Context()), "it was released, and says so again")
		require.Equal(t, deadline, old.Deadline())
		require.Greater(t, lk.Fence(), old.Fence())
		time.Sleep(time.Minute)
		require.Equal(t, deadline, old.Deadline())
		require.True(t, lk.Valid())
		require.NoError(t, lk.Context().Err())
		require.LessOrEqual(t, w.mini.TTL("lock:n"), ttl)
		w.mini.Del("lock:n")
		<-lk.Context().Done()
		require.ErrorIs(t, context.Cause(lk.Context()), lock.ErrLost)
		require.Equal(t, lock.ErrReleased, context.Cause(old.Context()))
		require.NoError(t, old.Release(t.Context()))
		require.ErrorIs(t, lk.Release(t.Context()), lock.ErrLost)
	})
}

// Each of these leases has to be released in Redis: the next gets a token of its own.
func TestWhatIsNotPassedOn(t *testing.T) {
	for name, c := range map[string]struct {
		hold, next []lock.Option
		meanwhile  func(t *testing.T, w *world, lk *lock.Lock)
	}{
		"another TTL":       {next: []lock.Option{lock.WithTTL(time.Minute)}},
		"another fencing":   {next: []lock.Option{lock.WithFencing()}},
		"no handoffs":       {hold: []lock.Option{lock.WithMaxHandoffs(0)}, next: []lock.Option{lock.WithMaxHandoffs(0)}},
		"a minimum hold":    {hold: []lock.Option{lock.WithMinHold(time.Second)}},
		"an extended lease": {meanwhile: func(t *testing.T, _ *world, lk *lock.Lock) { require.NoError(t, lk.Extend(t.Context(), time.Minute)) }},
		"a lease near its end": { // shorter than a run may be
			hold: []lock.Option{lock.WithTTL(time.Second)}, next: []lock.Option{lock.WithTTL(time.Second)},
			meanwhile: func(_ *testing.T, w *world, lk *lock.Lock) {
				w.proxy.Silence()
				time.Sleep(time.Until(lk.Deadline()) - time.Second/4)
				w.proxy.Cut()
				w.proxy.Heal()
			},
		},
		"a run of a second": {meanwhile: func(*testing.T, *world, *lock.Lock) { time.Sleep(time.Second) }},
	} {
		t.Run(name, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, w *world) {
				l := w.locker(t)
				lk := acquire(t, l.With(c.hold...), "n")
				next := wait(t, l.With(c.next...), "n")
				if c.meanwhile != nil {
					c.meanwhile(t, w, lk)
				}
				token, _ := w.mini.Get("lock:n")
				release(t, lk)
				got := next.lock(t)
				now, _ := w.mini.Get("lock:n")
				require.NotEqual(t, token, now)
				release(t, got)
			})
		})
	}
}

func TestALeaseLostInTheMiddleOfARunIsTheHoldersLossAndTheNextContends(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t, lock.WithFencing())
		first := acquire(t, l, "n")
		ws := line(t, l, "n", 3)
		release(t, first)
		second := ws[0].lock(t)
		w.mini.Del("lock:n")
		<-second.Context().Done()
		require.ErrorIs(t, context.Cause(second.Context()), lock.ErrLost)
		third := ws[1].lock(t) // without a release
		require.Greater(t, third.Fence(), second.Fence())
		require.ErrorIs(t, second.Release(t.Context()), lock.ErrLost)
		require.True(t, third.Valid(), "the loss of the one is not that of the other")
		require.NoError(t, first.Release(t.Context()))
		release(t, third)
		release(t, ws[2].lock(t))
	})
}

// released releases until the outcome is known: replies are lost on purpose.
func released(t *testing.T, lk *lock.Lock) {
	t.Helper()
	for {
		err := lk.Release(context.Background())
		if err == nil {
			return
		}
		require.ErrorIs(t, err, lock.ErrUnknown)
	}
}

func TestFencesOfARunRiseThroughLostReplies(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t, lock.WithFencing())
		lk := acquire(t, l, "n")
		var last lock.Fence
		for i := range 100 {
			if i%3 == 0 {
				w.proxy.On(redistest.Cmd("EVALSHA", "EVAL"), redistest.DropReply()).Skip(rand.N(3)).Times(1)
			}
			next, after := wait(t, l, "n"), wait(t, l, "n")
			released(t, lk)
			lk = next.lock(t)
			require.Greater(t, lk.Fence(), last)
			last = lk.Fence()
			after.cancel()
			<-after.result
		}
		n, err := w.mini.Get("fence:{lock:n}:n")
		require.NoError(t, err)
		require.NotEmpty(t, n)
		w.proxy.Heal()
		_ = lk.Release(t.Context())
	})
}

func TestFencesOfARunRiseThoughTheCounterIsGone(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t, lock.WithFencing())
		lk := acquire(t, l, "n")
		for range 50 { // several reservations
			next := wait(t, l, "n")
			w.mini.Del("fence:{lock:n}:n")
			release(t, lk)
			got := next.lock(t)
			if lock.SameLease(lk, got) {
				require.Greater(t, got.Fence(), lk.Fence())
			}
			lk = got
		}
		release(t, lk)
	})
}

func TestAReservationThatFailsIsNoLoss(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t, lock.WithFencing())
		lk := acquire(t, l, "n")
		refused := w.proxy.On(func(args []string) bool { return redistest.Cmd("EVALSHA", "EVAL")(args) && len(args) == 10 },
			redistest.ReplyError(outOfMemory))
		next := wait(t, l, "n")
		time.Sleep(time.Minute)
		require.True(t, lk.Valid(), "it is renewed plainly")
		require.Positive(t, refused.Hits())
		release(t, lk)
		got := next.lock(t)
		require.Equal(t, lk.Fence()+1, got.Fence())
		release(t, got)
	})
}

func TestARunEndsAfterItsGrantsWhileOthersListen(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		for _, opts := range [][]lock.Option{nil, {lock.WithFencing()}} {
			here, there := w.locker(t, opts...), w.direct(t, opts...)
			lk := acquire(t, here, "n")
			foreign := wait(t, there, "n")
			ws := line(t, here, "n", 40)
			grants := 1
			for !foreign.served() {
				release(t, lk)
				synctest.Wait()
				if foreign.served() {
					break
				}
				time.Sleep(100 * time.Microsecond) // less than the time for which the process stands back
				if foreign.served() {
					break
				}
				lk = ws[0].lock(t)
				ws = ws[1:]
				grants++
			}
			require.LessOrEqual(t, grants, 17)
			release(t, foreign.lock(t))
			for _, waiter := range ws {
				release(t, waiter.lock(t))
			}
		}
	})
}

func TestARunIsLongerWhenNobodyListensButNotInTime(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		lk := acquire(t, l, "n")
		tokens := map[string]bool{}
		for range 100 {
			next := wait(t, l, "n")
			time.Sleep(time.Millisecond)
			release(t, lk)
			lk = next.lock(t)
			token, _ := w.mini.Get("lock:n")
			tokens[token] = true
		}
		require.Len(t, tokens, 1)
		for range 10 {
			next := wait(t, l, "n")
			time.Sleep(300 * time.Millisecond)
			release(t, lk)
			lk = next.lock(t)
			token, _ := w.mini.Get("lock:n")
			tokens[token] = true
		}
		require.GreaterOrEqual(t, len(tokens), 3)
		release(t, lk)
	})
}

func TestAWaiterIsWokenByARelease(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		lk := acquire(t, w.direct(t), "n")
		l := w.locker(t)
		waiter := wait(t, l, "n")
		time.Sleep(rand.N(ttl))
		n := w.commands()
		start := time.Now()
		release(t, lk)
		got := waiter.lock(t)
		require.Zero(t, time.Since(start))
		require.Equal(t, n+1, w.commands(), "one try")
		release(t, got)
	})
}

func TestAReleaseBetweenTheTryAndTheSubscriptionIsNotMissed(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		lk := acquire(t, w.direct(t), "n")
		l := w.locker(t)
		slow := w.proxy.On(redistest.Cmd("SUBSCRIBE"), redistest.HoldRequest())
		waiter := wait(t, l, "n")
		<-slow.Hit(1)
		release(t, lk)
		slow.Off()
		start := time.Now()
		release(t, waiter.lock(t))
		require.Zero(t, time.Since(start))
	})
}

func TestAReleaseThatTellsNobodyIsNoticedWithinASecond(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		w.mini.Set("lock:n", "of a client that does not publish") // and has no TTL
		waiter := wait(t, w.locker(t), "n")
		time.Sleep(rand.N(time.Minute))
		start := time.Now()
		w.mini.Del("lock:n")
		release(t, waiter.lock(t))
		require.LessOrEqual(t, time.Since(start), time.Second)
	})
}

func TestACrashedHoldersLockIsTakenWhenItExpires(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		require.NoError(t, w.mini.Set("lock:n", "of a process that has crashed"))
		w.mini.SetTTL("lock:n", 7300*time.Millisecond)
		waiter := wait(t, w.locker(t), "n")
		release(t, waiter.lock(t))
		require.InDelta(t, 7300*time.Millisecond, w.elapsed(), float64(3*time.Millisecond))
	})
}

func TestATTLThatGrowsMeanwhileIsWaitedFor(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		holder := acquire(t, w.direct(t, lock.WithTTL(300*time.Millisecond)), "n") // renewed again and again
		waiter := wait(t, w.locker(t), "n")
		n := w.commands()
		time.Sleep(time.Minute)
		require.False(t, waiter.served())
		require.LessOrEqual(t, w.commands()-n, 60*8, "tries when the lease might have ended, but no more")
		release(t, holder)
		release(t, waiter.lock(t))
	})
}

func TestWaitersTryAgainAtOnceAfterAReconnect(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		lk := acquire(t, w.direct(t), "n")
		waiter := wait(t, w.locker(t), "n")
		time.Sleep(10 * time.Millisecond)
		w.proxy.RefuseAll()
		w.proxy.Cut() // the subscription too
		release(t, lk)
		w.proxy.Heal()
		start := time.Now()
		release(t, waiter.lock(t))
		require.LessOrEqual(t, time.Since(start), 150*time.Millisecond)
	})
}

func TestASubscriptionIsSharedAndClosedAfterTheLastWaiter(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		for _, name := range []string{"a", "b", "c"} {
			lk := acquire(t, w.direct(t), name)
			defer release(t, lk)
			ws := append(line(t, l, name, 3), line(t, l.With(lock.WithFencing()), name, 3)...)
			defer func() {
				for _, waiter := range ws {
					waiter.cancel()
					<-waiter.result
				}
				if name == "a" {
					synctest.Wait()
					time.Sleep(2 * time.Second)
					require.Empty(t, w.mini.PubSubChannels("*"))
				}
			}()
		}
		require.Equal(t, 3, w.proxy.Count(redistest.Cmd("SUBSCRIBE")))
		require.ElementsMatch(t, []string{"lock:a", "lock:b", "lock:c"}, w.mini.PubSubChannels("*"))
	})
}

func TestWithoutContentionNothingIsSubscribedOrAsked(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		for range 10 {
			release(t, acquire(t, l, "n"))
		}
		require.Zero(t, w.proxy.Count(redistest.Cmd("SUBSCRIBE", "SSUBSCRIBE")))
		require.Equal(t, 20, w.commands()-1, "and one script that the server did not know")
	})
}

func TestManyWaitersOfAProcessCostAsMuchAsOne(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		lk := acquire(t, w.direct(t), "n")
		l := w.locker(t)
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		const crowd = 10_000
		for range crowd {
			wg.Go(func() {
				if _, err := l.Acquire(ctx, "n"); !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		n := w.commands()
		time.Sleep(time.Minute)
		require.LessOrEqual(t, w.commands()-n, 81, "one try a second, or somewhat more")
		cancel()
		wg.Wait()
		require.LessOrEqual(t, w.commands()-n, 90)
		release(t, lk)
	})
}

func TestErrorsOfALineAreThoseOfItsHead(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t, lock.WithMaxWait(3*time.Second))
		lk := acquire(t, w.direct(t), "held")
		for _, waiter := range line(t, l, "held", 3) {
			<-waiter.result
			require.ErrorIs(t, waiter.err, lock.ErrHeld)
			require.NotErrorIs(t, waiter.err, context.DeadlineExceeded)
		}
		release(t, lk)
		w.proxy.On(redistest.Cmd("SET", "EVAL", "EVALSHA"), redistest.ReplyError("LOADING Redis is loading the dataset in memory"))
		for _, waiter := range line(t, l, "loading", 3) {
			<-waiter.result
			require.NotErrorIs(t, waiter.err, lock.ErrHeld, "nobody knows")
			require.ErrorContains(t, waiter.err, "LOADING")
		}
		w.proxy.Heal()
	})
}

func TestC32ErrorsArePausedForAndTheLineGoesOnAfterwards(t *testing.T) {
	for _, reply := range []string{"READONLY You can't write against a read only replica.", ""} {
		inVirtualTime(t, func(t *testing.T, w *world) {
			l := w.locker(t)
			release(t, acquire(t, l, "n"))
			var rule *redistest.Rule
			if reply == "" {
				w.proxy.RefuseAll()
			} else {
				rule = w.proxy.On(redistest.Cmd("SET", "EVAL", "EVALSHA"), redistest.ReplyError(reply))
			}
			ws := line(t, l, "n", 100)
			n := w.commands()
			time.Sleep(5 * time.Second)
			require.LessOrEqual(t, w.commands()-n, 60)
			w.proxy.Heal()
			if rule != nil {
				rule.Off()
			}
			start := time.Now()
			for _, waiter := range ws {
				release(t, waiter.lock(t))
			}
			require.LessOrEqual(t, time.Since(start), 2*time.Second)
		})
	}
}

func TestTryIsNotFooledByTheLine(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		lk := acquire(t, l, "n")
		n := w.commands()
		_, err := l.TryAcquire(t.Context(), "n")
		require.ErrorIs(t, err, lock.ErrHeld)
		require.Equal(t, n, w.commands(), "the process knows")
		release(t, lk)

		foreign := acquire(t, w.direct(t), "n")
		waiter := wait(t, l, "n")
		w.proxy.On(redistest.Cmd("SUBSCRIBE"), redistest.HoldRequest())
		_, err = l.TryAcquire(t.Context(), "n")
		require.ErrorIs(t, err, lock.ErrHeld)
		w.mini.Del("lock:n") // and nobody is told
		got, err := l.TryAcquire(t.Context(), "n")
		require.NoError(t, err, "the lock is free, though others wait")
		release(t, got)
		release(t, waiter.lock(t))
		_ = foreign.Release(t.Context())
	})
}

func TestAForeignWaiterGetsInAgainstOneThatRelocksAtOnce(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		w.proxy.Latency(200 * time.Microsecond) // the foreign one is slower
		hog, foreign := w.direct(t), w.locker(t)
		var releases []int
		for range 50 {
			lk := acquire(t, hog, "n")
			waiter := wait(t, foreign, "n")
			time.Sleep(10 * time.Millisecond)
			n := 0
			for !waiter.served() {
				release(t, lk)
				n++
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
				var err error
				lk, err = hog.Acquire(ctx, "n")
				cancel()
				if err != nil {
					break
				}
			}
			releases = append(releases, n)
			release(t, waiter.lock(t))
			settle(t, hog)
		}
		require.LessOrEqual(t, slices.Max(releases), 1)
	})
}

func TestAContextThatEndsWhileTheProcessStandsBackGivesNoLock(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t, lock.WithFencing())
		listener := w.rdb.Subscribe(t.Context(), "lock:n") // who is told, and takes nothing
		defer listener.Close()
		_, err := listener.Receive(t.Context())
		require.NoError(t, err)
		for range 20 {
			lk := acquire(t, l, "n")
			inLine := wait(t, l.With(lock.WithTTL(time.Minute)), "n") // of another kind: a true release
			release(t, lk)
			n := w.commands()
			time.Sleep(rand.N(2 * time.Millisecond))
			ctx, cancel := context.WithTimeout(t.Context(), rand.N(time.Millisecond))
			got, err := l.Acquire(ctx, "n")
			cancel()
			if err == nil {
				require.Positive(t, got.Fence())
				require.True(t, got.Valid())
				release(t, got)
			}
			inLine.cancel()
			if got := <-inLine.result; got != nil {
				require.True(t, got.Valid())
				require.Greater(t, w.commands(), n, "it was asked for")
				release(t, got)
			} else {
				require.ErrorIs(t, inLine.err, context.Canceled)
			}
			time.Sleep(time.Second)
		}
	})
}

func TestAProcessThatStandsBackTooShortlyToListenListensAfterwards(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		listener := w.rdb.Subscribe(t.Context(), "lock:n")
		defer listener.Close()
		_, err := listener.Receive(t.Context())
		require.NoError(t, err)
		release(t, acquire(t, l, "n"))
		lk := acquire(t, w.direct(t), "n")
		slow := w.proxy.On(redistest.Cmd("SUBSCRIBE"), redistest.DelayReply(50*time.Millisecond)).Times(1)
		waiter := wait(t, l, "n")
		<-slow.Hit(1)
		time.Sleep(time.Second)
		start := time.Now()
		release(t, lk)
		release(t, waiter.lock(t))
		require.Zero(t, time.Since(start), "it is woken")
	})
}

func TestATryBesideTheLineLeavesNoTrace(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		release(t, acquire(t, l, "warm"))
		require.NoError(t, w.mini.Set("lock:n", "foreign"))
		head := wait(t, l, "n")
		time.Sleep(10 * time.Millisecond)
		held := w.proxy.On(redistest.Cmd("SET"), redistest.HoldReply()).Times(1)
		tried := make(chan error, 1)
		go func() {
			_, err := l.TryAcquire(context.Background(), "n")
			tried <- err
		}()
		<-held.Hit(1)
		head.cancel()
		<-head.result // nobody is left in line
		w.proxy.Cut() // and the reply of the try is lost
		require.Error(t, <-tried)
		w.mini.Del("lock:n")
		release(t, acquire(t, l, "n"))
	})
}

func TestProlongationsThatFailCostNoLease(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t, lock.WithFencing())
		lk := acquire(t, l, "n")
		refused := w.proxy.On(func(args []string) bool { return redistest.Cmd("EVALSHA", "EVAL")(args) && len(args) == 10 },
			redistest.ReplyError(outOfMemory))
		visitor := l.With(lock.WithMaxWait(10 * time.Millisecond))
		for range 2000 {
			_, err := visitor.Acquire(t.Context(), "n")
			require.ErrorIs(t, err, lock.ErrHeld)
		}
		require.True(t, lk.Valid(), "renewals go on")
		require.Less(t, refused.Hits(), 50, "and prolongations pause")
		release(t, lk)
	})
}

func TestTwoLockersOnOneStoreWakeEachOther(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		s := lock.NewStore(w.rdb)
		a, b := lock.NewWithStore(s), lock.NewWithStore(s)
		lk := acquire(t, a, "n")
		waiter := wait(t, b, "n")
		time.Sleep(10 * time.Millisecond)
		start := time.Now()
		release(t, lk)
		release(t, waiter.lock(t))
		require.Zero(t, time.Since(start))
		settle(t, a)
		settle(t, b)
	})
}

func TestWaitWaitsForThoseWhoWait(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t, lock.WithMaxHandoffs(0))
		lk := acquire(t, l, "n")
		waiter := wait(t, l, "n")
		done := make(chan error, 1)
		go func() { done <- l.Wait(context.Background()) }()
		synctest.Wait()
		release(t, lk)
		next := waiter.lock(t)
		synctest.Wait()
		require.Empty(t, done, "a lock is held")
		release(t, next)
		require.NoError(t, <-done)
	})
}

func TestAStoreThatPanicsLeavesTheTurnToTheNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &panicking{Store: lock.NewStore(redistest.MiniClient(t, redistest.Mini(t)))}
		l := lock.NewWithStore(s)
		s.panics = true
		require.Panics(t, func() { _, _ = l.Acquire(t.Context(), "n") })
		s.panics = false
		release(t, acquire(t, l, "n"))
		settle(t, l)
	})
}

// The lease goes to a waiter whose context has just ended, while Redis is silent and hundreds of clean-ups are pending.
func TestADroppedGrantWaitsForNoCleanUp(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		var held []*lock.Lock
		for i := range 100 {
			held = append(held, acquire(t, l, fmt.Sprint("other", i)))
		}
		for range 50 {
			lk := acquire(t, l, "n")
			waiter := wait(t, l, "n")
			ended, cancel := context.WithCancel(t.Context())
			cancel()
			w.proxy.Silence()
			var wg sync.WaitGroup
			for _, other := range held {
				wg.Go(func() { _ = other.Release(ended) })
			}
			wg.Go(waiter.cancel)
			wg.Go(func() { _ = lk.Release(ended) })
			if got := <-waiter.result; got != nil {
				_ = got.Release(ended)
			}
			wg.Wait()
			w.proxy.Cut()
			w.proxy.Heal()
			ctx, stop := context.WithTimeout(t.Context(), 2*ttl)
			next, err := l.Acquire(ctx, "n")
			require.NoError(t, err)
			stop()
			release(t, next)
			held = nil
		}
	})
}

// granting is a Store that grants everything.
type granting struct{ lock.Store }

func (*granting) Acquire(context.Context, lock.Request) (lock.Reply, error) { return lock.Reply{}, nil }
func (*granting) Release(context.Context, lock.Request) (lock.Reply, error) { return lock.Reply{}, nil }
func (*granting) Wait(context.Context) error                                { return nil }

func TestNamesUsedOnceLeaveNothingInMemory(t *testing.T) {
	l := lock.NewWithStore(&granting{})
	names := 1_000_000
	if redistest.Race {
		names = 100_000
	}
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	use := func(from, to int) {
		for i := from; i < to; i++ {
			release(t, acquire(t, l, fmt.Sprint("name", i)))
		}
	}
	use(0, 1000)
	before := heap()
	use(1000, names)
	require.Less(t, heap(), before+1<<20)
	settle(t, l)
}
