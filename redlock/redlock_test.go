package redlock_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
	"github.com/redis/go-redis/v9/maintnotifications"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/internal/keys"
	"github.com/seed-b640e7e9/lock/internal/locktest"
	"github.com/seed-b640e7e9/lock/internal/redistest"
	"github.com/seed-b640e7e9/lock/redlock"
)

func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	redis.SetLogger(&logging.VoidLogger{})
	flag.Parse()
	_ = flag.Set("test.parallel", "8")
	goleak.VerifyTestMain(mainFunc(func() int { return redistest.Main(m) }))
}

type mainFunc func() int

func (f mainFunc) Run() int { return f() }

// backend is a quorum as the conformance suite wants it. direct are clients of the nodes.
func backend(t *testing.T, direct []*redis.Client, open func(t *testing.T) []redis.UniversalClient) locktest.Backend {
	each := func(f func(c *redis.Client) error) { // at once: one by one a renewal could heal what was done
		var wg sync.WaitGroup
		errs := make([]error, len(direct))
		for i, c := range direct {
			wg.Go(func() { errs[i] = f(c) })
		}
		wg.Wait()
		require.NoError(t, errors.Join(errs...))
	}
	return locktest.Backend{
		New: func(t *testing.T, opts ...lock.Option) *lock.Locker { return redlock.New(open(t), opts...) },
		Delete: func(t *testing.T, name string) {
			each(func(c *redis.Client) error { return c.Del(t.Context(), keys.Lock("", name)).Err() })
		},
		Overwrite: func(t *testing.T, name string) {
			each(func(c *redis.Client) error {
				return c.Set(t.Context(), keys.Lock("", name), "another", time.Minute).Err()
			})
		},
	}
}

func TestConformanceOverFiveServers(t *testing.T) {
	servers := make([]*redistest.Server, 5)
	direct := make([]*redis.Client, 5)
	for i := range servers {
		servers[i] = redistest.Start(t, redistest.Redis7)
		direct[i] = servers[i].Client(t)
	}
	locktest.Run(t, func(t *testing.T) locktest.Backend {
		return backend(t, direct, func(t *testing.T) []redis.UniversalClient {
			nodes := make([]redis.UniversalClient, 5)
			for i, s := range servers {
				nodes[i] = s.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
			}
			return nodes
		})
	})
}

func TestConformanceOverFiveMiniredisInVirtualTime(t *testing.T) {
	locktest.RunInBubbles(t, func(t *testing.T) locktest.Backend {
		minis := make([]*miniredis.Miniredis, 5)
		direct := make([]*redis.Client, 5)
		for i := range minis {
			minis[i] = redistest.Mini(t)
			direct[i] = redistest.MiniClient(t, minis[i])
		}
		return backend(t, direct, func(t *testing.T) []redis.UniversalClient {
			nodes := make([]redis.UniversalClient, 5)
			for i, m := range minis {
				nodes[i] = redistest.MiniClient(t, m, at(i))
			}
			return nodes
		})
	})
}

// world is a quorum in virtual time, each node behind a proxy of its own.
type world struct {
	minis   []*miniredis.Miniredis
	proxies []*redistest.Proxy
	start   time.Time
}

func inVirtualTime(t *testing.T, n int, f func(t *testing.T, w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		t.Cleanup(func() { time.Sleep(10 * time.Second) }) // go-redis still sleeps between dials
		w := &world{start: time.Now()}
		for range n {
			m := redistest.Mini(t)
			w.minis = append(w.minis, m)
			w.proxies = append(w.proxies, redistest.ProxyMini(t, m))
		}
		f(t, w)
	})
}

// locker returns a Locker through the proxies.
func (w *world) locker(t *testing.T, opts ...lock.Option) *lock.Locker {
	t.Helper()
	nodes := make([]redis.UniversalClient, len(w.minis))
	for i, p := range w.proxies {
		nodes[i] = p.Client(t, at(i), func(o *redis.Options) { o.ContextTimeoutEnabled = true })
	}
	return w.over(t, nodes, opts)
}

// direct returns a Locker that the proxies do not touch: another process.
func (w *world) direct(t *testing.T, opts ...lock.Option) *lock.Locker {
	t.Helper()
	nodes := make([]redis.UniversalClient, len(w.minis))
	for i, m := range w.minis {
		nodes[i] = redistest.MiniClient(t, m, at(i))
	}
	return w.over(t, nodes, opts)
}

func (w *world) over(t *testing.T, nodes []redis.UniversalClient, opts []lock.Option) *lock.Locker {
	l := redlock.New(nodes, opts...)
	t.Cleanup(func() { settle(t, l) })
	return l
}

// at gives a node an address of its own, which its dialer does not look at.
func at(i int) func(*redis.Options) {
	return func(o *redis.Options) {
		o.Addr = fmt.Sprintf("127.0.0.%d:6379", i+1)
		o.PoolSize = 1000 // go-redis's timers for those who wait for a connection outlive a bubble
		// And it waits for a silent server with a mutex locked, which stops virtual time.
		o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	}
}

func settle(t *testing.T, l *lock.Locker) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	require.NoError(t, l.Wait(ctx))
}

// holding returns how many nodes have the key.
func (w *world) holding(name string) int {
	n := 0
	for _, m := range w.minis {
		if m.Exists("lock:" + name) {
			n++
		}
	}
	return n
}

func acquire(t *testing.T, l *lock.Locker, name string) *lock.Lock {
	t.Helper()
	lk, err := l.Acquire(context.Background(), name)
	require.NoError(t, err)
	return lk
}

func release(t *testing.T, lk *lock.Lock) {
	t.Helper()
	require.NoError(t, lk.Release(context.Background()))
}

const ttl = 10 * time.Second

func TestNewRefusesWhatIsNoQuorum(t *testing.T) {
	c := func(addr string) redis.UniversalClient {
		rdb := redis.NewClient(&redis.Options{Addr: addr})
		t.Cleanup(func() { _ = rdb.Close() })
		return rdb
	}
	a, b, d := c("127.0.0.1:1"), c("127.0.0.1:2"), c("127.0.0.1:3")
	for _, nodes := range [][]redis.UniversalClient{
		nil, {a}, {a, b}, {a, b, d, c("127.0.0.1:4")}, {a, b, a}, {a, b, nil}, {a, b, (*redis.Client)(nil)}, {a, b, c("127.0.0.1:1")},
	} {
		require.Panics(t, func() { redlock.New(nodes) }, "%v", nodes)
	}
	require.NotNil(t, redlock.New([]redis.UniversalClient{a, b, d}))
}

func TestAMinorityMayBeDownSlowOrSilent(t *testing.T) {
	for name, harm := range map[string]func(p *redistest.Proxy){
		"refusing": func(p *redistest.Proxy) { p.RefuseAll() },
		"silent":   func(p *redistest.Proxy) { p.Silence() },
		"slow":     func(p *redistest.Proxy) { p.Latency(5 * time.Second) },
	} {
		for n, bad := range map[int]int{3: 1, 5: 2} {
			t.Run(fmt.Sprintf("%s/%d", name, n), func(t *testing.T) {
				inVirtualTime(t, n, func(t *testing.T, w *world) {
					for _, opts := range [][]lock.Option{nil, {lock.WithFencing()}} {
						l := w.locker(t, opts...)
						release(t, acquire(t, l, "warm"))
						settle(t, l)
						for _, p := range w.proxies[:bad] {
							harm(p)
						}
						start := time.Now()
						lk := acquire(t, l, "n")
						require.Zero(t, time.Since(start), "the others decide")
						require.NoError(t, lk.Extend(t.Context(), ttl))
						require.Zero(t, time.Since(start))
						time.Sleep(5 * time.Minute)
						require.True(t, lk.Valid())
						start = time.Now()
						release(t, lk)
						require.Zero(t, time.Since(start))
						for _, p := range w.proxies {
							p.Latency(0)
							p.Heal()
						}
						settle(t, l)
						time.Sleep(2 * ttl) // the node may have got to see the commands only now
						require.Zero(t, w.holding("n"))
					}
				})
			})
		}
	}
}

func TestWithoutAQuorumThereIsNoLock(t *testing.T) {
	inVirtualTime(t, 3, func(t *testing.T, w *world) {
		l := w.locker(t)
		release(t, acquire(t, l, "warm"))
		w.proxies[0].RefuseAll()
		w.proxies[1].RefuseAll()
		_, err := l.TryAcquire(t.Context(), "n")
		require.Error(t, err)
		require.NotErrorIs(t, err, lock.ErrHeld)
		var node *redlock.NodeError
		require.ErrorAs(t, err, &node)
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		_, err = l.Acquire(ctx, "n")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NotErrorIs(t, err, lock.ErrHeld)
		w.proxies[0].Heal()
		w.proxies[1].Heal()
		settle(t, l)
		require.Zero(t, w.holding("n"), "the votes are given back")

		lk := acquire(t, w.direct(t), "n")
		_, err = l.TryAcquire(t.Context(), "n")
		require.ErrorIs(t, err, lock.ErrHeld)
		release(t, lk)
	})
}

func TestASilentLossOfTheQuorumIsALoss(t *testing.T) { // C31
	inVirtualTime(t, 5, func(t *testing.T, w *world) {
		lk := acquire(t, w.locker(t), "n")
		synctest.Wait() // for all five
		for _, m := range w.minis[:3] {
			m.FlushAll()
		}
		<-lk.Context().Done()
		require.ErrorIs(t, context.Cause(lk.Context()), lock.ErrLost)
		require.LessOrEqual(t, time.Since(w.start), ttl/3+time.Second)
		require.ErrorIs(t, lk.Release(t.Context()), lock.ErrLost)
	})
}

func TestANodeThatHasForgottenGetsItsTokenAgain(t *testing.T) {
	inVirtualTime(t, 5, func(t *testing.T, w *world) {
		lk := acquire(t, w.locker(t), "n")
		synctest.Wait()
		w.minis[0].FlushAll()
		w.minis[1].FlushAll()
		require.Equal(t, 3, w.holding("n"))
		time.Sleep(ttl / 2)
		synctest.Wait()
		require.Equal(t, 5, w.holding("n"))
		require.NoError(t, w.minis[2].Set("lock:n", "another"))
		time.Sleep(ttl)
		got, _ := w.minis[2].Get("lock:n")
		require.Equal(t, "another", got, "never over another's")
		require.True(t, lk.Valid())
		w.minis[2].Del("lock:n")
		release(t, lk)
		time.Sleep(2 * ttl)
		require.Zero(t, w.holding("n"))
	})
}

func TestNothingIsReinstalledAfterARelease(t *testing.T) {
	inVirtualTime(t, 3, func(t *testing.T, w *world) {
		for range 30 {
			l := w.locker(t)
			lk := acquire(t, l, "n")
			synctest.Wait()
			w.minis[0].FlushAll()
			slow := w.proxies[0].On(redistest.Cmd("EVAL", "EVALSHA"), redistest.DelayReply(300*time.Millisecond))
			<-slow.Hit(1)
			release(t, lk)
			slow.Off()
			settle(t, l)
			require.Zero(t, w.holding("n"))
		}
	})
}

func TestALateGrantIsGivenBack(t *testing.T) {
	inVirtualTime(t, 3, func(t *testing.T, w *world) {
		l := w.locker(t)
		lk := acquire(t, w.direct(t), "n")
		synctest.Wait()
		w.minis[2].Del("lock:n")
		w.proxies[2].On(redistest.Cmd("SET"), redistest.DelayRequest(4*time.Second)).Times(1)
		_, err := l.TryAcquire(t.Context(), "n")
		require.ErrorIs(t, err, lock.ErrHeld)
		release(t, lk)
		settle(t, l)
		require.Greater(t, time.Since(w.start), 4*time.Second)
		require.Zero(t, w.holding("n"), "it came after the clean-up had begun")
	})
}

func TestSplitVotesResolve(t *testing.T) {
	for _, contenders := range []int{2, 5, 20} {
		inVirtualTime(t, 5, func(t *testing.T, w *world) {
			for i, p := range w.proxies {
				p.Latency(time.Duration(i+1) * time.Millisecond)
			}
			var wg sync.WaitGroup
			var mu sync.Mutex
			held := 0
			for range contenders {
				l := w.locker(t)
				wg.Go(func() {
					lk, err := l.Acquire(context.Background(), "n")
					if err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					if held++; held != 1 {
						t.Error("two holders")
					}
					mu.Unlock()
					time.Sleep(time.Millisecond)
					mu.Lock()
					held--
					mu.Unlock()
					if err := lk.Release(context.Background()); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			tries := 0
			for _, p := range w.proxies {
				tries += p.Count(redistest.Cmd("SET"))
			}
			t.Logf("%d contenders: all served after %v, %.1f rounds each", contenders, time.Since(w.start).Round(time.Millisecond), float64(tries)/5/float64(contenders))
			require.Less(t, time.Since(w.start), time.Minute)
		})
	}
}

// The counters of five nodes stand at 0, 100, 100, 100 and 0. Each choice of a quorum has to give a number above all that
// were given before, and a slow write-back of an old grant must not make a number come twice.
func TestFencesRiseWhicheverNodesAnswer(t *testing.T) {
	for _, n := range []int{3, 5} {
		inVirtualTime(t, n, func(t *testing.T, w *world) {
			for i, m := range w.minis {
				if 0 < i && i < n-1 {
					require.NoError(t, m.Set("fence:{lock:n}:n", "100"))
				}
			}
			l := w.locker(t, lock.WithFencing(), lock.WithTTL(time.Second))
			last := lock.Fence(0)
			minority := n / 2
			for down := range 1 << n { // each set of nodes that may be down, again and again
				if bits(down) > minority {
					continue
				}
				for i, p := range w.proxies {
					if down>>i&1 == 1 {
						p.RefuseAll()
						p.Cut()
					}
				}
				// And one of the others fails between the two rounds, now and then.
				if bits(down) < minority && down%3 == 0 {
					w.proxies[(down+1)%n].On(redistest.Cmd("EVAL", "EVALSHA"), redistest.DropReply()).Skip(1).Times(1)
				}
				lk := acquire(t, l, "n")
				if last > 0 {
					require.Greater(t, lk.Fence(), last, "down: %b", down)
				}
				last = lk.Fence()
				_ = lk.Release(context.Background())
				for _, p := range w.proxies {
					p.Heal()
				}
				settle(t, l)
			}
			require.Greater(t, last, lock.Fence(100))
		})
	}
}

func bits(n int) int {
	count := 0
	for ; n > 0; n &= n - 1 {
		count++
	}
	return count
}

func TestAClockFenceRisesAfterAWipeAndAPlainOneMayNot(t *testing.T) {
	inVirtualTime(t, 3, func(t *testing.T, w *world) {
		for _, c := range []struct {
			opt   lock.Option
			rises bool
		}{{lock.WithFencing(), false}, {lock.WithClockFencing(), true}} {
			l := w.locker(t, c.opt)
			var last lock.Fence
			for range 5 {
				lk := acquire(t, l, "n")
				last = lk.Fence()
				release(t, lk)
			}
			settle(t, l)
			for _, m := range w.minis {
				m.FlushAll()
			}
			time.Sleep(time.Second)
			lk := acquire(t, l, "n")
			require.Equal(t, c.rises, lk.Fence() > last)
			release(t, lk)
			settle(t, l)
			for _, m := range w.minis {
				m.FlushAll()
			}
		}
	})
}

func TestWaitersAreWokenAndPassOn(t *testing.T) {
	inVirtualTime(t, 3, func(t *testing.T, w *world) {
		foreign, l := w.direct(t), w.locker(t, lock.WithFencing())
		lk := acquire(t, foreign, "n")
		w.proxies[0].RefuseAll() // wake-ups of any node help, none is relied on
		var mu sync.Mutex
		var fences []lock.Fence
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() {
				err := l.Do(context.Background(), "n", func(ctx context.Context) error {
					lk, _ := lock.FromContext(ctx)
					mu.Lock()
					defer mu.Unlock()
					fences = append(fences, lk.Fence())
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		time.Sleep(5 * time.Second)
		start := time.Now()
		release(t, lk)
		wg.Wait()
		require.Less(t, time.Since(start), 100*time.Millisecond)
		for i := 1; i < len(fences); i++ {
			require.Greater(t, fences[i], fences[i-1])
		}
		w.proxies[0].Heal()
	})
}

func TestManyCommandsOnASilentNodeAreBounded(t *testing.T) {
	inVirtualTime(t, 3, func(t *testing.T, w *world) {
		l := w.locker(t)
		release(t, acquire(t, l, "warm"))
		settle(t, l)
		w.proxies[0].Silence()
		var wg sync.WaitGroup
		for i := range 300 {
			wg.Go(func() {
				lk, err := l.Acquire(context.Background(), fmt.Sprint(i))
				if err != nil {
					t.Error(err)
					return
				}
				if err := lk.Release(context.Background()); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		require.Zero(t, time.Since(w.start))
		w.proxies[0].Heal()
	})
}

func TestReleaseOfUnknownOutcomeCanBeRepeated(t *testing.T) {
	inVirtualTime(t, 3, func(t *testing.T, w *world) {
		l := w.locker(t)
		lk := acquire(t, l, "n")
		for _, p := range w.proxies[:2] {
			p.On(redistest.Cmd("EVAL", "EVALSHA"), redistest.DropReply()).Times(2)
		}
		if err := lk.Release(t.Context()); err != nil {
			require.ErrorIs(t, err, lock.ErrUnknown)
			require.NotErrorIs(t, err, lock.ErrLost)
		}
		require.NoError(t, lk.Release(t.Context()))
		require.False(t, errors.Is(context.Cause(lk.Context()), lock.ErrLost))
	})
}
