package lock_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math"
	"net"
	"reflect"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/internal/redistest"
)

// The tests whose names begin with C and a number are things that went wrong for users of other locks.

func TestC01ALostReplyOnAcquireLeavesNothingBehind(t *testing.T) {
	for _, opts := range [][]lock.Option{nil, {lock.WithFencing()}} {
		inVirtualTime(t, func(t *testing.T, w *world) {
			l, other := w.locker(t, opts...), w.direct(t)
			lost := w.proxy.On(redistest.Any(), redistest.DropReply())
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			lk, err := l.Acquire(ctx, "n")
			require.Nil(t, lk)
			require.ErrorIs(t, err, lock.ErrUnknown)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.NotErrorIs(t, err, lock.ErrHeld)
			lost.Off()
			time.Sleep(2 * time.Second)
			next, err := other.TryAcquire(t.Context(), "n")
			require.NoError(t, err, "well before the TTL")
			settle(t, l)
			require.True(t, next.Valid(), "the clean-up touches nobody else's lock")
			require.NoError(t, next.Extend(t.Context(), time.Minute))
			release(t, next)
		})
	}
}

func TestC02ALostReplyIsRecognisedByItsToken(t *testing.T) {
	for _, opts := range [][]lock.Option{nil, {lock.WithFencing()}} {
		inVirtualTime(t, func(t *testing.T, w *world) {
			l := w.locker(t, opts...)
			for range 3 {
				w.proxy.On(redistest.Any(), redistest.DropReply()).Times(1)
				lk, err := l.TryAcquire(t.Context(), "n")
				require.NoError(t, err)
				if opts != nil {
					require.EqualValues(t, must(w.rdb.Get(t.Context(), "fence:{lock:n}:n").Int64()), lk.Fence())
				}
				time.Sleep(3 * ttl)
				require.True(t, lk.Valid(), "the watchdog runs")
				release(t, lk)
				require.False(t, w.mini.Exists("lock:n"))
			}
		})
	}
}

func TestC04NothingIsSentWithADeadContext(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		for _, f := range []func() error{
			func() error { _, err := l.Acquire(ctx, "n"); return err },
			func() error { _, err := l.TryAcquire(ctx, "n"); return err },
			func() error { return l.Do(ctx, "n", func(context.Context) error { panic("ran") }) },
		} {
			require.ErrorIs(t, f(), context.Canceled)
			require.NotErrorIs(t, f(), lock.ErrUnknown)
		}
		require.Zero(t, w.proxy.Count(redistest.Any()))
	})
}

func TestC04ACancelledAcquireLeavesNothingBehind(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		w.proxy.On(redistest.Any(), redistest.DelayReply(300*time.Millisecond))
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(100*time.Millisecond, cancel)
		l := w.locker(t)
		lk, err := l.Acquire(ctx, "n")
		require.Nil(t, lk)
		require.ErrorIs(t, err, context.Canceled)
		require.LessOrEqual(t, w.elapsed(), 300*time.Millisecond)
		time.Sleep(time.Second)
		require.False(t, w.mini.Exists("lock:n"))
	})
}

func TestC05AnOutageIsNeitherBusyNorGoAhead(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"}) // nothing listens there
	defer rdb.Close()
	l := lock.New(rdb, lock.WithTTL(time.Second))
	for name, do := range map[string]func(context.Context, string, func(context.Context) error) error{"Do": l.Do, "TryDo": l.TryDo} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		err := do(ctx, "n", func(context.Context) error { panic("ran") })
		cancel()
		var dial *net.OpError
		require.ErrorAs(t, err, &dial, name)
		require.NotErrorIs(t, err, lock.ErrHeld, name)
		require.NotErrorIs(t, err, lock.ErrLost, name)
	}
	require.NoError(t, l.Wait(t.Context()))

	inVirtualTime(t, func(t *testing.T, w *world) {
		lk := acquire(t, w.direct(t), "n")
		defer release(t, lk)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := w.locker(t).Do(ctx, "n", func(context.Context) error { panic("ran") })
		require.ErrorIs(t, err, lock.ErrHeld)
		require.ErrorIs(t, err, context.DeadlineExceeded)
	})
}

func TestC06APipelineIsNoClient(t *testing.T) {
	client := reflect.TypeFor[redis.UniversalClient]()
	for _, pipe := range []reflect.Type{reflect.TypeFor[redis.Pipeliner](), reflect.TypeFor[*redis.Pipeline](), reflect.TypeFor[*redis.Tx]()} {
		require.False(t, pipe.Implements(client), "%v would have to be refused by New", pipe)
	}
	require.Panics(t, func() { lock.New(nil) })
	require.Panics(t, func() { lock.New((*redis.ClusterClient)(nil)) })
}

func TestC07NamesAreBytesAndNeverEmpty(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t, lock.WithPrefix("p:"))
		_, err := l.Acquire(t.Context(), "")
		require.ErrorContains(t, err, "empty name")
		require.Zero(t, w.proxy.Count(redistest.Any()))
		for _, name := range []string{"a", "a\x00b", "\xff", "\xfe", "é", "e\u0301", "a b", "a\r\nb", strings.Repeat("x", 1<<20)} {
			lk := acquire(t, l, name)
			require.Equal(t, []string{"p:lock:" + name}, w.mini.Keys())
			_, err := w.direct(t, lock.WithPrefix("p:")).TryAcquire(t.Context(), name)
			require.ErrorIs(t, err, lock.ErrHeld)
			require.Less(t, len(err.Error()), 1000, "the error does not repeat all of a long name")
			require.NoError(t, lk.Extend(t.Context(), time.Minute))
			release(t, lk)
		}
	})
}

func TestC08AnInvalidTTLChangesNothing(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		lk := acquire(t, w.locker(t, lock.WithTTL(5*time.Second)), "n")
		left, deadline, n := w.mini.TTL("lock:n"), lk.Deadline(), w.proxy.Count(redistest.Any())
		for _, d := range []time.Duration{0, -1, -5 * time.Second, math.MinInt64, math.MaxInt64, time.Microsecond} {
			require.Panics(t, func() { lock.New(w.rdb, lock.WithTTL(d)) })
			require.Error(t, lk.Extend(t.Context(), d))
			require.Equal(t, left, w.mini.TTL("lock:n"))
			require.Equal(t, deadline, lk.Deadline())
			require.True(t, lk.Valid())
		}
		require.Equal(t, n, w.proxy.Count(redistest.Any()))
		release(t, lk)
	})
}

func TestC08TheLongestTTLIsOneThatAServerTakes(t *testing.T) {
	onServers(t, func(t *testing.T, rdb redis.UniversalClient) {
		l := lock.New(rdb, lock.WithTTL(10*365*24*time.Hour), lock.WithFencing())
		lk := acquire(t, l, "longest")
		require.True(t, lk.Valid())
		require.Greater(t, time.Until(lk.Deadline()), 9*365*24*time.Hour)
		require.Greater(t, rdb.PTTL(t.Context(), "lock:longest").Val(), 9*365*24*time.Hour)
		release(t, lk)
	})
}

func TestC09ShortTTLsAreKeptToTheMillisecond(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		for _, d := range []time.Duration{1500 * time.Millisecond, 500 * time.Millisecond, 15500 * time.Microsecond, 10 * time.Millisecond} {
			l := w.locker(t, lock.WithTTL(d))
			start := time.Now()
			lk := acquire(t, l, "n")
			whole := d.Truncate(time.Millisecond)
			require.Equal(t, whole, w.mini.TTL("lock:n"))
			require.Equal(t, start.Add(whole-drift(whole)), lk.Deadline(), "no longer than the server's lease")
			before := w.proxy.Count(redistest.Cmd("EVALSHA"))
			time.Sleep(30 * whole)
			synctest.Wait()
			require.True(t, lk.Valid())
			require.InDelta(t, 100, w.proxy.Count(redistest.Cmd("EVALSHA"))-before, 50, "about three in a TTL: %v", d)
			release(t, lk)
		}
	})
}

func TestC10AReleaseHasItsOwnTimeWhenItsContextIsDead(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t, lock.WithTTL(30*time.Second))
		ctx, cancel := context.WithCancel(t.Context())
		require.ErrorIs(t, l.Do(ctx, "n", func(ctx context.Context) error {
			cancel()
			return ctx.Err()
		}), context.Canceled)
		require.False(t, w.mini.Exists("lock:n"))

		for _, f := range []func(ctx context.Context, cancel func()) error{
			func(ctx context.Context, cancel func()) error {
				return l.Do(ctx, "n", func(context.Context) error { w.proxy.Silence(); cancel(); return nil })
			},
			func(ctx context.Context, cancel func()) error {
				lk, err := l.Acquire(ctx, "n")
				require.NoError(t, err)
				w.proxy.Silence()
				cancel()
				err = lk.Release(ctx)
				require.ErrorIs(t, err, lock.ErrUnknown)
				return nil
			},
		} {
			ctx, cancel := context.WithCancel(t.Context())
			start := time.Now()
			require.NoError(t, f(ctx, cancel))
			require.LessOrEqual(t, time.Since(start), 1100*time.Millisecond, "the documented second")
			w.proxy.Cut()
			w.proxy.Heal()
			time.Sleep(5 * time.Second)
			require.False(t, w.mini.Exists("lock:n"), "and the delete went on")
		}
	})
}

func TestC11ALostReplyOnReleaseIsNoLoss(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		var log bytes.Buffer
		l := w.locker(t, lock.WithTTL(30*time.Second), lock.WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
		release(t, acquire(t, l, "warm"))
		lk := acquire(t, l, "n")
		w.proxy.On(redistest.Cmd("EVALSHA"), redistest.DropReply()).Times(1)
		require.NoError(t, lk.Release(t.Context()))
		require.NoError(t, lk.Release(t.Context()))
		require.False(t, w.mini.Exists("lock:n"))

		own := errors.New("own")
		require.Equal(t, own, l.Do(t.Context(), "n", func(context.Context) error {
			w.proxy.On(redistest.Cmd("EVALSHA"), redistest.DropReply()).Times(1)
			return own
		}))
		require.Empty(t, log.String(), "no loss was told")

		// Another takes the lock between the two deletes.
		lk = acquire(t, l, "n")
		first := w.proxy.On(redistest.Cmd("EVALSHA"), redistest.SwallowReply()).Times(1)
		other := w.direct(t)
		done := make(chan error)
		go func() { done <- lk.Release(t.Context()) }()
		<-first.Hit(1)
		next := acquire(t, other, "n")
		require.NoError(t, <-done)
		require.NoError(t, next.Extend(t.Context(), time.Minute), "and is left alone")
		release(t, next)
	})
}

func TestC12AnExpiredHolderHarmsNobody(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		a := acquire(t, w.locker(t, lock.WithTTL(300*time.Millisecond), lock.WithMaxHold(time.Millisecond)), "n")
		time.Sleep(400 * time.Millisecond)
		other := w.direct(t)
		b := acquire(t, other, "n")
		value, left := must(w.mini.Get("lock:n")), w.mini.TTL("lock:n")
		require.ErrorIs(t, a.Release(t.Context()), lock.ErrLost)
		synctest.Wait()
		require.Equal(t, value, must(w.mini.Get("lock:n")))
		require.Equal(t, left, w.mini.TTL("lock:n"))
		_, err := w.locker(t).TryAcquire(t.Context(), "n")
		require.ErrorIs(t, err, lock.ErrHeld)
		release(t, b)
	})
}

func TestC13ASecondReleaseHarmsNobody(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		a := acquire(t, w.locker(t), "n")
		release(t, a)
		b := acquire(t, w.direct(t), "n")
		n := w.proxy.Count(redistest.Any())
		require.NoError(t, a.Release(t.Context()))
		require.Equal(t, n, w.proxy.Count(redistest.Any()), "nothing is even sent")
		require.True(t, b.Valid())
		release(t, b)
	})
}

func TestC14AFailedReleaseHidesNothing(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		var log bytes.Buffer
		l := w.locker(t, lock.WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
		for _, want := range []error{errors.New("own"), context.Canceled, nil} {
			log.Reset()
			ran := 0
			err := l.Do(t.Context(), "n", func(context.Context) error {
				ran++
				w.proxy.RefuseAll()
				return want
			})
			require.Equal(t, want, err)
			require.Equal(t, 1, ran)
			require.Contains(t, log.String(), "release failed")
			w.proxy.Heal()
			time.Sleep(2 * ttl)
		}
	})
}

func TestC15APanicReleasesBeforeItGoesOn(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		private := new(int)
		func() {
			defer func() {
				require.Same(t, private, recover())
				require.False(t, w.mini.Exists("lock:n"))
			}()
			_ = l.Do(t.Context(), "n", func(context.Context) error { panic(private) })
		}()
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = l.Do(t.Context(), "n", func(context.Context) error { runtime.Goexit(); return nil })
		}()
		<-done
		require.False(t, w.mini.Exists("lock:n"))
		n := w.proxy.Count(redistest.Any())
		require.ErrorContains(t, l.Do(t.Context(), "n", nil), "nil function")
		time.Sleep(time.Hour)
		require.Equal(t, n, w.proxy.Count(redistest.Any()), "no watchdog runs, and a nil fn takes no lock")
	})
}

func TestC33OppositeOrdersEndWithTheContext(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		var failed atomic.Int32
		both := make(chan struct{}, 2)
		cross := func(l *lock.Locker, first, second string) {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			err := l.Do(ctx, first, func(ctx context.Context) error {
				both <- struct{}{}
				for len(both) < 2 {
					time.Sleep(time.Millisecond)
				}
				return l.Do(ctx, second, func(context.Context) error { return nil })
			})
			if err != nil {
				failed.Add(1)
			}
		}
		l, other := w.locker(t), w.direct(t)
		done := make(chan struct{})
		go func() { defer close(done); cross(l, "a", "b") }()
		cross(other, "b", "a")
		<-done
		require.Positive(t, failed.Load())
		require.Less(t, w.elapsed(), 1100*time.Millisecond)
		require.Empty(t, w.mini.Keys(), "both are free again")
	})
}

func TestC33OneOfTwoWins(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t)
		results := make(chan error, 2)
		var held atomic.Pointer[lock.Lock]
		for range 2 {
			go func() {
				lk, err := l.TryAcquire(t.Context(), "n")
				if err == nil {
					held.Store(lk)
				}
				results <- err
			}()
		}
		a, b := <-results, <-results
		if a == nil {
			a, b = b, a
		}
		require.ErrorIs(t, a, lock.ErrHeld)
		require.NoError(t, b)
		release(t, held.Load())
	})
}
