package lock_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/internal/redistest"
)

func TestTheDeadlineCountsFromTheSendAndNotFromTheReply(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		for _, opts := range [][]lock.Option{nil, {lock.WithFencing()}} {
			release(t, acquire(t, w.locker(t, opts...), "n")) // now the server knows the scripts
			w.proxy.On(redistest.Any(), redistest.DelayReply(900*time.Millisecond)).Times(1)
			start := time.Now()
			lk := acquire(t, w.locker(t, opts...), "n")
			require.Equal(t, 900*time.Millisecond, time.Since(start))
			require.Equal(t, start.Add(ttl-drift(ttl)), lk.Deadline())
			release(t, lk)
		}
		lk := acquire(t, w.locker(t), "n")
		require.NoError(t, lk.Extend(t.Context(), time.Second))
		w.proxy.On(redistest.Any(), redistest.DelayReply(900*time.Millisecond)).Times(1)
		sent := time.Now()
		require.NoError(t, lk.Extend(t.Context(), time.Minute))
		require.Equal(t, 900*time.Millisecond, time.Since(sent))
		require.Equal(t, sent.Add(time.Minute-drift(time.Minute)), lk.Deadline())
		release(t, lk)
	})
}

func TestTheDeadlineCountsFromTheSendOfARenewal(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		lk := acquire(t, w.locker(t), "n")
		time.Sleep(ttl) // the server knows the script by now
		renewal := w.proxy.On(redistest.Cmd("EVALSHA"), redistest.HoldReply()).Times(1)
		<-renewal.Hit(1)
		sent := time.Now()
		time.Sleep(900 * time.Millisecond)
		synctest.Wait()
		require.Less(t, lk.Deadline(), sent.Add(ttl-drift(ttl)))
		renewal.Release()
		synctest.Wait()
		require.Equal(t, sent.Add(ttl-drift(ttl)), lk.Deadline())
		release(t, lk)
	})
}

func TestAGrantThatARetryFoundIsNotTrustedBeyondTheKeysExpiry(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		for _, opts := range [][]lock.Option{nil, {lock.WithFencing()}} {
			w.proxy.On(redistest.Any(), redistest.DropReply()).Times(1)
			w.proxy.On(redistest.Any(), redistest.DelayRequest(500*time.Millisecond)).Times(1)
			lk := acquire(t, w.locker(t, opts...), "n")
			require.GreaterOrEqual(t, w.elapsed(), 500*time.Millisecond)
			require.Less(t, time.Until(lk.Deadline()), w.mini.TTL("lock:n"))
			release(t, lk)
		}
	})
}

func TestC18TheHolderHearsBeforeAnyoneElseCanGetIn(t *testing.T) {
	// The network goes silent at any moment of a lease; what counts is when the last confirmed renewal was sent.
	for i := range 20 {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, i%2 == 0)
			l := w.locker(t)
			lk := acquire(t, l, "n")
			time.Sleep(rand.N(10 * ttl))
			synctest.Wait()
			w.proxy.Silence()
			deadline := lk.Deadline()
			<-lk.Context().Done()
			require.Equal(t, deadline, time.Now(), "neither late nor early")
			require.ErrorIs(t, context.Cause(lk.Context()), lock.ErrLost)
			require.ErrorIs(t, context.Cause(lk.Context()), lock.ErrUnknown)
			require.Positive(t, w.mini.TTL("lock:n"), "the key is still there")
			require.False(t, lk.Valid())
			w.proxy.Cut()
			w.proxy.Heal()
			require.ErrorIs(t, lk.Release(t.Context()), lock.ErrLost)
			settle(t, l)
			require.False(t, w.mini.Exists("lock:n"), "nothing is left behind after a loss either")
		})
	}
}

func TestALeaseIsRenewedThreeTimesInItsTTL(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		lk := acquire(t, w.locker(t), "n")
		time.Sleep(3 * time.Hour)
		synctest.Wait()
		require.True(t, lk.Valid())
		var last time.Time
		n := 0
		for _, c := range w.proxy.Commands() {
			if !redistest.Cmd("EVALSHA", "EVAL")(c.Args) {
				continue
			}
			if gap := c.At.Sub(last); n > 1 { // the first was sent twice, as the server did not know the script
				require.LessOrEqual(t, gap, ttl/3)
				require.GreaterOrEqual(t, gap, ttl/3-ttl/30-time.Millisecond)
			}
			last = c.At
			n++
		}
		require.InDelta(t, 3*3600/ttl.Seconds()*3*1.05, n, 150)
		release(t, lk)
		time.Sleep(time.Hour)
		require.Equal(t, n+2, w.proxy.Count(redistest.Cmd("EVALSHA", "EVAL")), "after the release nothing renews")
	})
}

func TestLeasesTakenTogetherAreRenewedTogetherButNotInStep(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		var held []*lock.Lock
		for i := range 100 {
			held = append(held, acquire(t, l, fmt.Sprint(i)))
		}
		time.Sleep(4 * ttl)
		synctest.Wait()
		instants := map[time.Time]int{}
		for _, c := range w.proxy.Commands() {
			if redistest.Cmd("EVALSHA")(c.Args) {
				instants[c.At]++
			}
		}
		require.Greater(t, len(instants), 200, "spread out in time")
		require.Less(t, len(instants), 100*13, "and many in one pipeline")
		for _, lk := range held {
			require.True(t, lk.Valid())
			release(t, lk)
		}
	})
}

func TestARenewalWithoutAnAnswerIsSentAgainOnAnotherConnection(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		// So short a lease would be over before the command that gets no answer is given up.
		lk := acquire(t, w.locker(t, lock.WithTTL(time.Second)), "n")
		for range 5 {
			dead := w.proxy.On(redistest.Cmd("EVALSHA"), redistest.SwallowReply()).Times(1)
			<-dead.Hit(1)
			time.Sleep(time.Second)
			require.True(t, lk.Valid())
		}
		release(t, lk)
	})
}

func TestASlowAnswerIsUsedAndDelaysNoOther(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		slow, quick := acquire(t, l, "slow"), acquire(t, l, "quick")
		w.proxy.On(redistest.Arg("lock:slow"), redistest.DelayReply(900*time.Millisecond))
		time.Sleep(time.Minute)
		require.True(t, slow.Valid())
		require.True(t, quick.Valid())
		require.Greater(t, time.Until(quick.Deadline()), ttl/2)
		release(t, quick)
		release(t, slow)
	})
}

func TestRenewalsThatFailAreRepeatedWithGrowingPausesUntilTheDeadline(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		lk := acquire(t, w.locker(t), "n")
		deadline := lk.Deadline()
		failing := w.proxy.On(redistest.Any(), redistest.ReplyError("READONLY You can't write against a read only replica."))
		<-lk.Context().Done()
		require.Equal(t, deadline, time.Now())
		cause := context.Cause(lk.Context())
		require.ErrorIs(t, cause, lock.ErrLost)
		require.ErrorIs(t, cause, lock.ErrUnknown)
		require.ErrorContains(t, cause, "READONLY", "the last renewal's error is there")
		require.Greater(t, failing.Hits(), 3)
		require.Less(t, failing.Hits(), 30)
		failing.Off()
		require.ErrorIs(t, lk.Release(t.Context()), lock.ErrLost)
	})
}

func TestALeaseSurvivesAnOutageShorterThanItself(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		lk := acquire(t, w.locker(t), "n")
		for range 10 {
			time.Sleep(rand.N(ttl))
			w.proxy.RefuseAll()
			time.Sleep(ttl / 2)
			w.proxy.Heal()
			time.Sleep(ttl / 6)
			require.True(t, lk.Valid())
			require.Greater(t, time.Until(lk.Deadline()), ttl/2)
		}
		release(t, lk)
	})
}

func TestTheServersWordIsALossAtOnce(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		for what, change := range map[string]func(){
			"deleted":     func() { w.mini.Del("lock:n") },
			"overwritten": func() { _ = w.mini.Set("lock:n", "another") },
			"wrong type":  func() { w.mini.Del("lock:n"); _, _ = w.mini.Push("lock:n", "x") },
		} {
			lk := acquire(t, w.locker(t), "n")
			start := time.Now()
			change()
			<-lk.Context().Done()
			require.LessOrEqual(t, time.Since(start), ttl/3, what)
			cause := context.Cause(lk.Context())
			require.ErrorIs(t, cause, lock.ErrLost, what)
			require.NotErrorIs(t, cause, lock.ErrUnknown, what)
			require.ErrorIs(t, lk.Release(t.Context()), lock.ErrLost, what)
			require.ErrorIs(t, lk.Extend(t.Context(), ttl), lock.ErrLost, what)
			require.NotErrorIs(t, lk.Extend(t.Context(), ttl), lock.ErrReleased, what)
			require.Equal(t, what != "deleted", w.mini.Exists("lock:n"), what)
			w.mini.Del("lock:n")
		}
	})
}

func TestExtendNeverShortens(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		lk := acquire(t, w.locker(t), "n")
		require.NoError(t, lk.Extend(t.Context(), time.Minute))
		deadline, left := lk.Deadline(), w.mini.TTL("lock:n")
		require.Equal(t, time.Minute, left)
		require.NoError(t, lk.Extend(t.Context(), time.Second))
		require.Equal(t, deadline, lk.Deadline())
		require.Equal(t, left, w.mini.TTL("lock:n"))
		time.Sleep(ttl) // renewals do not shorten it either
		synctest.Wait()
		require.Equal(t, deadline, lk.Deadline())
		require.Equal(t, left-ttl, w.mini.TTL("lock:n"))
		release(t, lk)
	})
}

func TestALateCopyOfACommandShortensNothing(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		lk := acquire(t, w.locker(t, lock.WithFencing()), "n")
		late := w.proxy.On(redistest.Cmd("EVALSHA"), redistest.HoldRequest()).Times(1)
		<-late.Hit(1) // a renewal for the TTL is on its way
		require.NoError(t, lk.Extend(t.Context(), time.Hour))
		late.Release()
		synctest.Wait()
		require.Greater(t, w.mini.TTL("lock:n"), time.Hour-time.Minute)
		release(t, lk)
	})
}

func TestExtendGivesAKeyWithoutAnExpiryOneAgain(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		lk := acquire(t, w.locker(t), "n")
		w.mini.SetTTL("lock:n", 0) // what PERSIST does
		require.NoError(t, lk.Extend(t.Context(), time.Minute))
		require.Equal(t, time.Minute, w.mini.TTL("lock:n"))
		release(t, lk)
	})
}

func TestExtendOutlivesTheWatchdogsOutage(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		lk := acquire(t, w.locker(t), "n")
		require.NoError(t, lk.Extend(t.Context(), time.Minute))
		w.proxy.RefuseAll()
		time.Sleep(time.Minute - 3*time.Second) // go-redis notices within a second or two that it can dial again
		require.True(t, lk.Valid())
		w.proxy.Heal()
		time.Sleep(time.Minute)
		require.True(t, lk.Valid(), "and then renewals go on")
		release(t, lk)
		require.ErrorIs(t, lk.Extend(t.Context(), time.Minute), lock.ErrReleased)
	})
}

func TestExtendIsRepeatedWhileItsOutcomeIsUnknown(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		lk := acquire(t, w.locker(t), "n")
		w.proxy.On(redistest.Any(), redistest.DropReply()).Times(2)
		require.NoError(t, lk.Extend(t.Context(), time.Minute))
		require.Less(t, w.elapsed(), time.Second)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		n := w.proxy.Count(redistest.Any())
		require.ErrorIs(t, lk.Extend(ctx, time.Hour), context.Canceled)
		require.Equal(t, n, w.proxy.Count(redistest.Any()), "a dead context sends nothing")
		release(t, lk)
	})
}

func TestALateAnswerRevivesNothing(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		lk := acquire(t, w.locker(t), "n")
		require.NoError(t, lk.Extend(t.Context(), ttl)) // the server knows the script
		slow := w.proxy.On(redistest.Arg("60000"), redistest.DelayReply(500*time.Millisecond))
		answer := make(chan error)
		go func() { answer <- lk.Extend(t.Context(), time.Minute) }()
		<-slow.Hit(1)
		release(t, lk)
		require.ErrorIs(t, <-answer, lock.ErrReleased)
		require.False(t, lk.Valid())
		require.ErrorIs(t, lk.Extend(t.Context(), ttl), lock.ErrReleased)
	})
}

func TestC17ALateRenewalAfterReleaseTouchesNobody(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		var log bytes.Buffer
		lk := acquire(t, w.locker(t, lock.WithLogger(slog.New(slog.NewTextHandler(&log, nil)))), "n")
		late := w.proxy.On(redistest.Cmd("EVALSHA"), redistest.HoldRequest()).Times(1)
		<-late.Hit(1)
		release(t, lk)
		next := acquire(t, w.direct(t, lock.WithTTL(500*time.Millisecond)), "n")
		late.Release()
		synctest.Wait()
		require.LessOrEqual(t, w.mini.TTL("lock:n"), 500*time.Millisecond)
		require.True(t, next.Valid())
		release(t, next)
		require.Equal(t, lock.ErrReleased, context.Cause(lk.Context()))
		require.Empty(t, log.String())
	})
}

func TestMaxHoldEndsTheLeaseExactlyThen(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		for _, hold := range []time.Duration{25 * time.Second, time.Hour, 11 * time.Second} {
			start := time.Now()
			err := w.locker(t, lock.WithMaxHold(hold)).Do(t.Context(), "n", func(ctx context.Context) error {
				<-ctx.Done()
				require.LessOrEqual(t, time.Since(start), hold)
				require.GreaterOrEqual(t, time.Since(start), hold-drift(ttl))
				cause := context.Cause(ctx)
				require.ErrorIs(t, cause, lock.ErrLost)
				require.NotErrorIs(t, cause, lock.ErrUnknown)
				require.ErrorContains(t, cause, "WithMaxHold")
				time.Sleep(hold - time.Since(start) + time.Millisecond)
				require.False(t, w.mini.Exists("lock:n"))
				return nil
			})
			require.ErrorIs(t, err, lock.ErrLost)
		}
	})
}

func TestMaxHoldWithinTheTTLMeansNoRenewal(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		for _, hold := range []time.Duration{ttl, time.Second} {
			l := w.locker(t, lock.WithMaxHold(hold))
			lk := acquire(t, l, "n")
			start := time.Now()
			n := w.proxy.Count(redistest.Any())
			<-lk.Context().Done()
			require.Equal(t, ttl-drift(ttl), time.Since(start))
			require.Equal(t, n, w.proxy.Count(redistest.Any()))
			require.ErrorIs(t, lk.Release(t.Context()), lock.ErrLost)
			settle(t, l)
		}
	})
}

func TestAForgottenLockIsNoLongerRenewed(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		var log bytes.Buffer
		l := w.locker(t, lock.WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
		kept := acquire(t, l, "kept")
		ctx := acquire(t, l, "context kept").Context()
		func() { _ = acquire(t, l, "forgotten") }()
		time.Sleep(time.Minute)
		runtime.GC()
		runtime.GC()
		time.Sleep(2 * ttl)
		synctest.Wait()
		require.False(t, w.mini.Exists("lock:forgotten"))
		require.Equal(t, 1, strings.Count(log.String(), "no longer renewed"))
		require.Contains(t, log.String(), "name=forgotten")
		require.True(t, kept.Valid())
		require.NoError(t, ctx.Err(), "whoever has the context has the lock")
		lk, ok := lock.FromContext(ctx)
		require.True(t, ok)
		release(t, lk)
		release(t, kept)
	})
}

func TestALogHandlerMayAskTheLock(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		var lk *lock.Lock
		asked := make(chan bool, 1)
		l := w.locker(t, lock.WithLogger(slog.New(handler{slog.DiscardHandler, func() { asked <- lk.Valid() }})))
		lk = acquire(t, l, "n")
		w.proxy.RefuseAll()
		require.False(t, <-asked)
		w.proxy.Heal()
		require.ErrorIs(t, lk.Release(t.Context()), lock.ErrLost)
	})
}

type handler struct {
	slog.Handler
	f func()
}

func (h handler) Enabled(context.Context, slog.Level) bool { return true }
func (h handler) Handle(context.Context, slog.Record) error {
	h.f()
	return nil
}

func TestC22HundredsOfLeasesOutliveASecondOfSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, true)
		l := w.locker(t)
		var held []*lock.Lock
		for i := range 500 {
			held = append(held, acquire(t, l, fmt.Sprint(i)))
		}
		time.Sleep(ttl)
		w.proxy.Silence()
		time.Sleep(time.Second)
		w.proxy.Heal()
		time.Sleep(ttl)
		for _, lk := range held {
			require.True(t, lk.Valid())
		}
		w.proxy.Silence()
		start := time.Now()
		for _, lk := range held {
			<-lk.Context().Done()
		}
		require.LessOrEqual(t, time.Since(start), ttl, "all are told in time when it stays silent")
		w.proxy.Cut()
		w.proxy.Heal()
	})
}

func TestC23ScriptsAreSentAgainWhenTheServerHasForgottenThem(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		flush := func() { require.NoError(t, redistest.MiniClient(t, w.mini).ScriptFlush(t.Context()).Err()) }
		l := w.locker(t, lock.WithFencing())
		lk := acquire(t, l, "n")
		flush()
		time.Sleep(ttl / 2)
		synctest.Wait()
		require.Greater(t, w.mini.TTL("lock:n"), ttl/2)
		flush()
		require.NoError(t, lk.Extend(t.Context(), time.Minute))
		flush()
		release(t, lk)
		require.False(t, w.mini.Exists("lock:n"))
		flush()
		require.NoError(t, lock.Fence(7).Set(t.Context(), w.rdb, "k", "v"))
	})
}
