package call_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock/internal/call"
	"github.com/seed-b640e7e9/lock/internal/redistest"
)

// crowd is what many goroutines send at the same time.
type crowd struct {
	*call.Batcher
	rdb   *redis.Client
	mini  *miniredis.Miniredis
	proxy *redistest.Proxy
}

func newCrowd(t *testing.T, opt func(o *redis.Options)) *crowd {
	t.Helper()
	c := &crowd{mini: redistest.Mini(t)}
	c.proxy = redistest.ProxyMini(t, c.mini)
	c.rdb = c.proxy.Client(t, func(o *redis.Options) {
		o.PoolSize = 200
		o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled} // for them it dials with a mutex locked
		opt(o)
	})
	c.Batcher = call.NewBatcher(call.New(c.rdb))
	return c
}

// inACrowd runs f in a bubble, with each kind of client.
func inACrowd(t *testing.T, f func(t *testing.T, c *crowd)) {
	for _, inline := range []bool{false, true} {
		t.Run(fmt.Sprintf("ContextTimeoutEnabled=%v", inline), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCrowd(t, func(o *redis.Options) { o.ContextTimeoutEnabled = inline })
				f(t, c)
				c.proxy.Heal()
				time.Sleep(10 * time.Second) // what was left has come to its end by then
			})
		})
	}
}

const many = 100

// each sends n commands at the same time, and returns how they ended.
func (c *crowd) each(ctx context.Context, n int, command func(i int) []any) []error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() { errs[i] = c.Process(ctx, &call.Message{Cmder: redis.NewCmd(ctx, command(i)...)}, 0) })
	}
	wg.Wait()
	return errs
}

// settle lets all connections find out in what state they are.
func (c *crowd) settle() {
	for range 10 {
		c.each(context.Background(), many, set)
	}
}

func set(i int) []any { return []any{"set", fmt.Sprint("k", i), i} }

func TestNothingIsSentForThoseWhoLeftWhileAConnectionWasDialed(t *testing.T) {
	for _, inline := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			gate := make(chan struct{})
			c := newCrowd(t, func(o *redis.Options) {
				o.ContextTimeoutEnabled = inline
				dial := o.Dialer
				o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
					<-gate
					return dial(context.WithoutCancel(ctx), network, addr)
				}
			})
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			for _, err := range c.each(ctx, many, set) {
				require.ErrorIs(t, err, context.DeadlineExceeded)
			}
			close(gate)
			time.Sleep(10 * time.Second)
			require.Empty(t, c.mini.Keys())
		})
	}
}

func TestManyCommandsShareRoundTrips(t *testing.T) {
	inACrowd(t, func(t *testing.T, c *crowd) {
		c.proxy.Latency(100 * time.Millisecond)
		c.settle()
		start := time.Now()
		for _, err := range c.each(t.Context(), many, set) {
			require.NoError(t, err)
		}
		require.Less(t, time.Since(start), 110*time.Millisecond)
		for i := range many {
			c.mini.CheckGet(t, fmt.Sprint("k", i), fmt.Sprint(i))
		}
	})
}

func TestEachCommandOfABatchHasItsOwnAnswer(t *testing.T) {
	inACrowd(t, func(t *testing.T, c *crowd) {
		c.mini.Lpush("k50", "x")
		errs := c.each(t.Context(), many, func(i int) []any { return []any{"incrby", fmt.Sprint("k", i), i} })
		for i, err := range errs {
			if i == 50 {
				require.True(t, call.HasCode(err, "WRONGTYPE"))
				continue
			}
			require.NoError(t, err)
			c.mini.CheckGet(t, fmt.Sprint("k", i), fmt.Sprint(i))
		}
	})
}

func TestABatchThatIsNotAnsweredDoesNotHoldUpOthers(t *testing.T) {
	inACrowd(t, func(t *testing.T, c *crowd) {
		c.each(t.Context(), many, set)
		c.proxy.On(redistest.Arg("k50"), redistest.SwallowReply()).Times(1)
		var first sync.WaitGroup
		defer first.Wait()
		start := time.Now()
		first.Go(func() {
			for _, err := range c.each(t.Context(), many, set) {
				if err != nil {
					require.Equal(t, call.Unknown, call.ClassOf(err))
				}
			}
			require.LessOrEqual(t, time.Since(start), call.Limit)
		})
		synctest.Wait()
		for _, err := range c.each(t.Context(), many, func(i int) []any { return set(many + i) }) {
			require.NoError(t, err)
		}
		require.Less(t, time.Since(start), 10*time.Millisecond)
	})
}

func TestACommandInABatchIsLeftWhenItsContextEnds(t *testing.T) {
	inACrowd(t, func(t *testing.T, c *crowd) {
		c.each(t.Context(), many, set)
		c.proxy.Silence()
		waiting, stop := context.WithCancel(t.Context())
		var held sync.WaitGroup
		held.Go(func() { c.each(waiting, many, set) })
		synctest.Wait()
		var late sync.WaitGroup
		late.Go(func() { // in the queue, once four pipelines are on their way
			time.Sleep(10 * time.Millisecond)
			for i := range 4 {
				held.Go(func() { c.each(waiting, 1, func(int) []any { return set(200 + i) }) })
				time.Sleep(10 * time.Millisecond)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
			defer cancel()
			start := time.Now()
			err := c.each(ctx, 1, func(int) []any { return []any{"set", "late", 1} })[0]
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.Equal(t, call.NotDone, call.ClassOf(err), "it was not sent")
			require.Equal(t, 10*time.Millisecond, time.Since(start))
		})
		late.Wait()
		start := time.Now()
		stop()
		held.Wait()
		require.LessOrEqual(t, time.Since(start), call.Limit, "those that are sent by themselves are the last")
		c.proxy.Heal()
		time.Sleep(10 * time.Second) // whatever was sent has come by now
		require.False(t, c.mini.Exists("late"))
	})
}

func TestWhatWasSentInABatchIsUnknownAndWhatWasNotIsNot(t *testing.T) {
	for name, f := range map[string]struct {
		make  func(c *crowd)
		class call.Class
	}{
		"replies are lost": {func(c *crowd) { c.proxy.On(redistest.Cmd("set"), redistest.DropReply()) }, call.Unknown},
		"no connection": {func(c *crowd) {
			c.proxy.Cut()
			c.proxy.RefuseAll()
			c.settle()
		}, call.NotDone},
		"a wrong password": {func(c *crowd) {
			c.proxy.Cut()
			c.mini.RequireAuth("secret")
			c.settle()
		}, call.Never},
		"nobody answers": {func(c *crowd) { c.proxy.Silence() }, call.Unknown},
	} {
		t.Run(name, func(t *testing.T) {
			inACrowd(t, func(t *testing.T, c *crowd) {
				c.each(t.Context(), many, set)
				f.make(c)
				ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
				defer cancel()
				start := time.Now()
				classes := map[call.Class]int{}
				for _, err := range c.each(ctx, many, set) {
					classes[call.ClassOf(err)]++
				}
				require.LessOrEqual(t, time.Since(start), 520*time.Millisecond)
				require.Zero(t, classes[call.Done])
				require.Greater(t, classes[f.class], many*9/10, "%v", classes)
				if f.class != call.Unknown {
					require.LessOrEqual(t, classes[call.Unknown], 2*runtime.GOMAXPROCS(0), "of those that are sent by themselves: %v", classes)
				}
				c.proxy.Heal()
			})
		})
	}
}

func TestABatchIsSentAtMostOnce(t *testing.T) {
	inACrowd(t, func(t *testing.T, c *crowd) {
		c.proxy.On(redistest.Cmd("set"), redistest.DropReply())
		for _, err := range c.each(t.Context(), many, set) {
			require.Error(t, err)
			require.False(t, errors.Is(err, redis.Nil))
		}
		for i := range many {
			require.LessOrEqual(t, c.proxy.Count(redistest.Arg(fmt.Sprint("k", i))), 1)
		}
	})
}

func TestWhoComesLaterDoesNotWaitForAPipelineWithoutAnswer(t *testing.T) {
	inACrowd(t, func(t *testing.T, c *crowd) {
		c.settle()
		c.proxy.On(redistest.Arg("k50"), redistest.SwallowReply()).Times(1)
		var first sync.WaitGroup
		defer first.Wait()
		first.Go(func() { c.each(t.Context(), many, set) })
		time.Sleep(10 * time.Millisecond) // patience is over, and the queue was empty then
		start := time.Now()
		for _, err := range c.each(t.Context(), many, func(i int) []any { return set(many + i) }) {
			require.NoError(t, err)
		}
		require.Less(t, time.Since(start), 10*time.Millisecond)
	})
}

func TestALongRoundTripIsNotWaitedForTwice(t *testing.T) {
	inACrowd(t, func(t *testing.T, c *crowd) {
		c.proxy.Latency(100 * time.Millisecond)
		c.settle()
		var first sync.WaitGroup
		defer first.Wait()
		first.Go(func() { c.each(t.Context(), 2*runtime.GOMAXPROCS(0)+1, set) })
		time.Sleep(10 * time.Millisecond)
		start := time.Now()
		for _, err := range c.each(t.Context(), 1, func(int) []any { return set(500) }) {
			require.NoError(t, err)
		}
		require.Less(t, time.Since(start), 110*time.Millisecond)
	})
}

// Four answers are lost, each of a pipeline of its own. go-redis reads on for as long as its ReadTimeout says, which may be for ever.
func TestPipelinesThatNobodyWaitsForAreInNobodysWay(t *testing.T) {
	for name, opt := range map[string]func(o *redis.Options){
		"five seconds": func(*redis.Options) {},
		"for ever":     func(o *redis.Options) { o.ReadTimeout = -1 },
		"no deadlines": func(o *redis.Options) { o.ReadTimeout, o.ContextTimeoutEnabled = -2, true },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCrowd(t, opt)
				c.settle()
				for k := range 4 {
					c.proxy.On(redistest.Arg(fmt.Sprint("lost", k)), redistest.SwallowReply()).Times(1)
				}
				c.proxy.On(redistest.Arg("slow"), redistest.DelayReply(50*time.Millisecond))
				var w sync.WaitGroup
				w.Go(func() {
					c.each(t.Context(), 2*runtime.GOMAXPROCS(0), func(int) []any { return []any{"set", "slow", 1} })
				}) // so that others are not alone
				time.Sleep(time.Millisecond)
				for k := range 4 {
					w.Go(func() { c.each(t.Context(), 1, func(int) []any { return []any{"set", fmt.Sprint("lost", k), 1} }) })
					time.Sleep(time.Millisecond / 2)
				}
				w.Wait()
				time.Sleep(time.Second)
				for _, err := range c.each(t.Context(), many, set) {
					require.NoError(t, err)
				}
				c.proxy.Cut() // frees what hangs
				time.Sleep(10 * time.Second)
			})
		})
	}
}

// tracing is a hook that reads the arguments before they are sent, as those of OpenTelemetry do.
type tracing struct{ ends *atomic.Bool } // it ends the goroutine as well

func (tracing) DialHook(next redis.DialHook) redis.DialHook { return next }

func (tracing) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		_ = cmd.Args()
		return next(ctx, cmd)
	}
}

func (h tracing) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		for _, cmd := range cmds {
			_ = cmd.Args()
		}
		if h.ends != nil && h.ends.Load() {
			runtime.Goexit()
		}
		return next(ctx, cmds)
	}
}

func TestARefusedConnectionIsNoSuccessWhateverHooksRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(t, func(o *redis.Options) { o.ContextTimeoutEnabled, o.Password = true, "wrong" })
		c.mini.RequireAuth("secret")
		c.rdb.AddHook(tracing{})
		for _, err := range c.each(t.Context(), many, set) {
			require.Equal(t, call.Never, call.ClassOf(err), "%v", err)
		}
	})
}

func TestAHookThatEndsItsGoroutineHoldsUpNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
		var ends atomic.Bool
		c.rdb.AddHook(tracing{ends: &ends})
		ends.Store(true)
		for _, err := range c.each(t.Context(), many, set) {
			if err != nil {
				require.Equal(t, call.Unknown, call.ClassOf(err), "it has read the arguments")
			}
		}
		ends.Store(false)
		for _, err := range c.each(t.Context(), many, set) {
			require.NoError(t, err)
		}
	})
}
