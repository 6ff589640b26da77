package lock_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/internal/redistest"
)

// inACrowd is inVirtualTime for many goroutines: a client with connections enough.
func inACrowd(t *testing.T, o func(*redis.Options), f func(t *testing.T, w *world)) {
	for _, inline := range []bool{false, true} {
		t.Run(fmt.Sprintf("ContextTimeoutEnabled=%v", inline), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				t.Cleanup(func() { time.Sleep(10 * time.Second) })
				m := redistest.Mini(t)
				p := redistest.ProxyMini(t, m)
				rdb := p.Client(t, func(op *redis.Options) {
					op.ContextTimeoutEnabled = inline
					op.PoolSize = 200
					op.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
					if o != nil {
						o(op)
					}
				})
				f(t, &world{mini: m, proxy: p, rdb: rdb, start: time.Now()})
			})
		})
	}
}

type argsHook struct{}

func (argsHook) DialHook(n redis.DialHook) redis.DialHook { return n }
func (argsHook) ProcessHook(n redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, c redis.Cmder) error { _ = c.Args(); return n(ctx, c) }
}
func (argsHook) ProcessPipelineHook(n redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cs []redis.Cmder) error {
		for _, c := range cs {
			_ = c.Args()
		}
		return n(ctx, cs)
	}
}

// go-redis tells of a refused connection only the pipeline as a whole; a hook that reads arguments makes it look as if all was sent.
func TestAWrongPasswordIsToldWhateverHooksRead(t *testing.T) {
	inACrowd(t, func(o *redis.Options) { o.Password = "wrong" }, func(t *testing.T, w *world) {
		w.mini.RequireAuth("secret")
		w.rdb.AddHook(argsHook{})
		l := w.locker(t)
		var mu sync.Mutex
		outcomes := map[string]int{}
		var wg sync.WaitGroup
		for i := range 50 {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
				defer cancel()
				start := time.Now()
				_, err := l.TryAcquire(ctx, fmt.Sprint("n", i))
				mu.Lock()
				defer mu.Unlock()
				outcomes[fmt.Sprintf("unknown=%v permanent=%v after %v: %v", errors.Is(err, lock.ErrUnknown), lock.IsPermanent(err), time.Since(start).Round(time.Second), errors.Unwrap(err))]++
			})
		}
		wg.Wait()
		for k, n := range outcomes {
			t.Log(n, k)
		}
		for k := range outcomes {
			require.NotContains(t, k, "unknown=true")
		}
	})
}

// Those who come after a pipeline without an answer are not held up, whatever they lock.
func TestOneLostAnswerHoldsUpNoOtherLock(t *testing.T) {
	inACrowd(t, nil, func(t *testing.T, w *world) {
		l := w.locker(t)
		all := func(from, n int) (worst time.Duration, failed int) {
			var mu sync.Mutex
			var wg sync.WaitGroup
			for i := range n {
				wg.Go(func() {
					ctx, cancel := context.WithTimeout(t.Context(), 900*time.Millisecond)
					defer cancel()
					start := time.Now()
					err := l.TryDo(ctx, fmt.Sprint("n", from+i), func(context.Context) error { return nil })
					mu.Lock()
					defer mu.Unlock()
					worst = max(worst, time.Since(start))
					if err != nil {
						failed++
					}
				})
			}
			wg.Wait()
			return
		}
		for range 5 {
			all(0, 100)
		}
		w.proxy.On(redistest.All(redistest.Cmd("set"), redistest.Arg("lock:n50")), redistest.SwallowReply()).Times(1)
		var first sync.WaitGroup
		first.Go(func() { all(0, 100) })
		time.Sleep(10 * time.Millisecond)
		worst, failed := all(1000, 100)
		first.Wait()
		t.Logf("worst %v, failed %d of 100", worst, failed)
		require.Zero(t, failed)
		require.Less(t, worst, 50*time.Millisecond)
	})
}

// Held locks, renewals, forgotten: a Lock that failed to release and was dropped, a lost one, and others that reuse tethers.
func TestATetherIsUsedAgainOnlyWhenItIsFree(t *testing.T) {
	inACrowd(t, nil, func(t *testing.T, w *world) {
		l := w.locker(t)
		kept := acquire(t, l, "kept")
		for i := range 200 {
			lk := acquire(t, l, fmt.Sprint("x", i))
			switch i % 3 {
			case 0:
				release(t, lk)
				release(t, lk)
			case 1:
				w.mini.Del(fmt.Sprintf("lock:x%d", i))
				require.ErrorIs(t, lk.Release(t.Context()), lock.ErrLost)
			case 2:
				var wg sync.WaitGroup
				for range 5 {
					wg.Go(func() { _ = lk.Release(t.Context()) })
				}
				wg.Wait()
			}
			if i%20 == 0 {
				runtime.GC()
			}
		}
		var held []*lock.Lock
		for i := range 50 {
			held = append(held, acquire(t, l, fmt.Sprint("y", i)))
		}
		for range 5 {
			runtime.GC()
			time.Sleep(ttl)
		}
		require.True(t, kept.Valid())
		for _, h := range held {
			require.True(t, h.Valid())
		}
		func() {
			for i := range 50 {
				_ = acquire(t, l, fmt.Sprint("z", i))
			}
		}()
		runtime.GC()
		runtime.GC()
		time.Sleep(2 * ttl)
		synctest.Wait()
		for i := range 50 {
			require.False(t, w.mini.Exists(fmt.Sprint("lock:z", i)))
		}
		for _, h := range held {
			require.True(t, h.Valid())
			release(t, h)
		}
		release(t, kept)
	})
}

type valueHook struct {
	argsHook
	with, without atomic.Int64
}

type valueKey struct{}

func (h *valueHook) ProcessHook(n redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, c redis.Cmder) error { h.count(ctx, c); return n(ctx, c) }
}
func (h *valueHook) count(ctx context.Context, c redis.Cmder) {
	if c.Name() != "set" {
		return
	}
	if ctx.Value(valueKey{}) != nil {
		h.with.Add(1)
	} else {
		h.without.Add(1)
	}
}
func (h *valueHook) ProcessPipelineHook(n redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cs []redis.Cmder) error {
		for _, c := range cs {
			h.count(ctx, c)
		}
		return n(ctx, cs)
	}
}

func TestHooksSeeTheValuesOfAContext(t *testing.T) {
	inACrowd(t, nil, func(t *testing.T, w *world) {
		h := &valueHook{}
		w.rdb.AddHook(h)
		l := w.locker(t)
		var wg sync.WaitGroup
		for i := range 50 {
			wg.Go(func() {
				_ = l.TryDo(context.WithValue(t.Context(), valueKey{}, 1), fmt.Sprint("n", i), func(context.Context) error { return nil })
			})
		}
		wg.Wait()
		require.Zero(t, h.without.Load())
	})
}

type panicHook struct{ argsHook }

func (h panicHook) ProcessHook(n redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, c redis.Cmder) error { time.Sleep(5 * time.Millisecond); panic("hook") }
}
func (h panicHook) ProcessPipelineHook(n redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cs []redis.Cmder) error { time.Sleep(5 * time.Millisecond); panic("hook") }
}

func TestAPanicInAHookReachesTheCaller(t *testing.T) {
	s := redistest.Start(t, redistest.Redis7)
	rdb := s.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
	rdb.AddHook(panicHook{})
	l := lock.New(rdb)
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			defer func() { _ = recover() }()
			_ = l.TryDo(t.Context(), fmt.Sprint("n", i), func(context.Context) error { return nil })
		})
	}
	wg.Wait()
}

// The pool is exhausted for 600 ms. Callers leave after 100 ms, before anything was sent; nothing may be sent later either, when
// their clean-up has ended.
func TestNothingIsSentForThoseWhoHaveLeft(t *testing.T) {
	for _, inline := range []bool{false, true} {
		t.Run(fmt.Sprint(inline), func(t *testing.T) {
			s := redistest.Start(t, redistest.Redis7)
			rdb := s.Client(t, func(o *redis.Options) { o.PoolSize, o.PipelinePoolSize, o.ContextTimeoutEnabled = 3, -1, inline })
			other := s.Client(t)
			l := lock.New(rdb, lock.WithTTL(300*time.Millisecond))
			var block sync.WaitGroup
			for range 3 {
				block.Go(func() { rdb.BLPop(context.Background(), 600*time.Millisecond, "nothing") })
			}
			require.Eventually(t, func() bool { s := rdb.PoolStats(); return s.TotalConns == 3 && s.IdleConns == 0 }, time.Minute, time.Millisecond)
			var wg sync.WaitGroup
			var unknown atomic.Int64
			start := time.Now()
			for i := range 50 {
				wg.Go(func() {
					ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
					defer cancel()
					if _, err := l.TryAcquire(ctx, fmt.Sprint("n", i)); errors.Is(err, lock.ErrUnknown) {
						unknown.Add(1)
					}
				})
			}
			wg.Wait()
			t.Logf("all left after %v, %d of unknown outcome", time.Since(start), unknown.Load())
			worst, at := 0, time.Duration(0)
			for time.Since(start) < 1500*time.Millisecond {
				ks, _ := other.Keys(context.Background(), "lock:*").Result()
				if len(ks) > worst {
					worst, at = len(ks), time.Since(start)
				}
				time.Sleep(5 * time.Millisecond)
			}
			t.Logf("%d keys without a holder, at %v", worst, at)
			block.Wait()
			require.Zero(t, worst)
		})
	}
}
