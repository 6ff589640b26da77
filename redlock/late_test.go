package redlock_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/internal/redistest"
	"github.com/seed-b640e7e9/lock/redlock"
)

// one misconfigured node of three ends the waiting for a held lock.
func TestOneForbiddenNodeEndsWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		other, _ := c.process(t)
		l, links := c.process(t)
		links[0].tune(func(l *link) { l.refusal = lock.Permanent(errors.New("NOPERM")) })
		lk := acquire(t, other, "n")
		time.Sleep(100 * time.Millisecond)
		time.AfterFunc(time.Second, func() { _ = lk.Release(context.Background()) })
		mine, err := l.Acquire(timeout(t, time.Minute), "n")
		require.NoError(t, err, "permanent=%v", lock.IsPermanent(err))
		release(t, mine)
	})
}

// one forbidden and one dead for a second.
func TestOneForbiddenOneRestarting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		l, links := c.process(t)
		links[0].tune(func(l *link) { l.refusal = lock.Permanent(errors.New("NOPERM")) })
		c.nodes[1].crash()
		time.AfterFunc(time.Second, c.nodes[1].start)
		mine, err := l.Acquire(timeout(t, time.Minute), "n")
		require.NoError(t, err)
		release(t, mine)
	})
}

// a lost lock's Release answers nil if one node says unknown.
func TestLostReleaseWithOneUnknownIsNil(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		l, links := c.process(t)
		err := l.Do(t.Context(), "n", func(ctx context.Context) error {
			time.Sleep(time.Second)
			c.nodes[1].wipe()
			c.nodes[2].wipe()
			links[0].tune(func(l *link) { l.refusal = fmt.Errorf("%w: EOF", lock.ErrUnknown) })
			return nil
		})
		require.ErrorIs(t, err, lock.ErrLost)
		links[0].tune(func(l *link) { l.refusal = nil })
	})
}

// held and unknown at the same time.
func TestHeldIsNotUnknown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		other, _ := c.process(t)
		l, links := c.process(t)
		lk := acquire(t, other, "n")
		time.Sleep(100 * time.Millisecond)
		links[0].tune(func(l *link) { l.refusal = fmt.Errorf("%w: EOF", lock.ErrUnknown) })
		_, err := l.TryAcquire(t.Context(), "n")
		require.ErrorIs(t, err, lock.ErrHeld)
		require.NotErrorIs(t, err, lock.ErrUnknown)
		links[0].tune(func(l *link) { l.refusal = nil })
		release(t, lk)
	})
}

// Extend does not end with its context.
func TestExtendObeysContext(t *testing.T) {
	for _, ttl := range []time.Duration{5 * time.Second, time.Hour} {
		t.Run(ttl.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(3)
				l, links := c.process(t, lock.WithTTL(5*time.Second))
				lk := acquire(t, l, "n")
				cut(links, 0, 2)
				start := time.Now()
				_ = lk.Extend(timeout(t, 100*time.Millisecond), ttl)
				took := time.Since(start)
				cut(links)
				_ = lk.Release(context.Background())
				time.Sleep(time.Hour)
				require.Less(t, took, 200*time.Millisecond)
			})
		})
	}
}

// TryAcquire with a short TTL says split instead of held.
func TestHeldWithAShortTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		other, _ := c.process(t)
		l, links := c.process(t, lock.WithTTL(100*time.Millisecond))
		for _, k := range links {
			k.least = 15 * time.Millisecond
		}
		lk := acquire(t, other, "n")
		time.Sleep(100 * time.Millisecond)
		_, err := l.TryAcquire(t.Context(), "n")
		release(t, lk)
		require.ErrorIs(t, err, lock.ErrHeld)
	})
}

// in-flight bound: a burst at a node that went silent just now; a slow node that answers now and then.
func TestBurstAtASilentNodeIsBounded(t *testing.T) {
	for name, slow := range map[string]bool{"silent": false, "slow": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(3)
				l, links := c.process(t)
				if slow {
					links[0].least = 200 * time.Millisecond
				} else {
					cut(links, 0)
				}
				var wg sync.WaitGroup
				for i := range 5000 {
					if slow && i%50 == 0 {
						time.Sleep(5 * time.Millisecond)
					}
					wg.Go(func() {
						lk, err := l.Acquire(context.Background(), fmt.Sprint(i))
						if err == nil {
							_ = lk.Release(context.Background())
						}
					})
				}
				wg.Wait()
				links[0].mu.Lock()
				most := links[0].most
				links[0].mu.Unlock()
				cut(links)
				require.LessOrEqual(t, most, redlock.ManyMore+8)
			})
		})
	}
}

// extended lease, one node away at release for longer than the TTL.
func TestExtendedKeyIsCleanedUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		l, _ := c.process(t)
		lk := acquire(t, l, "n")
		require.NoError(t, lk.Extend(t.Context(), time.Hour))
		time.Sleep(100 * time.Millisecond)
		c.nodes[2].crash()
		release(t, lk)
		time.Sleep(12 * time.Second)
		c.nodes[2].start()
		time.Sleep(time.Minute)
		require.Equal(t, []string{"", "", ""}, c.holders())
	})
}

func (c *cluster) store(t *testing.T) (lock.Store, []*link) {
	links := make([]*link, len(c.nodes))
	stores := make([]lock.Store, len(c.nodes))
	for i, n := range c.nodes {
		links[i] = &link{memory: n, rnd: rand.New(rand.NewPCG(rand.Uint64(), 0)), slow: time.Millisecond}
		stores[i] = links[i]
	}
	s := redlock.Quorum(stores)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
		defer cancel()
		require.NoError(t, s.Wait(ctx))
		time.Sleep(time.Minute)
		require.Zero(t, redlock.Tokens(s), "tokens leak")
	})
	return s, links
}

func req(token string) lock.Request {
	return lock.Request{Key: lock.Key{Lock: "lock:n"}, Token: token, TTL: 10 * time.Second}
}

// a token asked for twice (late or cancelled grant), the second vote fails: nodes that refuse keep it.
func TestSpentTokenStaysAtNodesThatRefuse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		s, links := c.store(t)
		_, err := s.Acquire(t.Context(), req("T"))
		require.NoError(t, err)
		time.Sleep(100 * time.Millisecond)
		links[1].tune(func(l *link) { l.refusal = errRefused })
		links[2].tune(func(l *link) { l.refusal = errRefused })
		r := req("T")
		r.Again, r.Used = true, true
		reply, err := s.Acquire(t.Context(), r)
		require.Error(t, err)
		require.True(t, reply.Spent)
		links[1].tune(func(l *link) { l.refusal = nil })
		links[2].tune(func(l *link) { l.refusal = nil })
		time.Sleep(2 * time.Second)
		require.Equal(t, []string{"", "", ""}, c.holders(), "the token was given up, with clean-up and all")
	})
}

// the same through the Locker: a late grant (400 ms TTL), then two nodes refuse for a moment.
func TestLateGrantThenRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		l, links := c.process(t, lock.WithTTL(400*time.Millisecond), lock.WithFencing())
		c.setCounters(0, 5, 9) // two rounds
		for _, l := range links {
			l.least, l.slow = 82*time.Millisecond, 0
		}
		time.AfterFunc(329*time.Millisecond, func() {
			links[1].tune(func(l *link) { l.refusal = errRefused })
			links[2].tune(func(l *link) { l.refusal = errRefused })
		})
		_, _ = l.Acquire(timeout(t, 340*time.Millisecond), "n")
		links[1].tune(func(l *link) { l.refusal = nil })
		links[2].tune(func(l *link) { l.refusal = nil })
		for _, l := range links {
			l.tune(func(l *link) { l.least = 0 })
		}
		settle(t, l)
		require.Equal(t, []string{"", "", ""}, c.holders(), "Wait says nothing is left")
	})
}

// a loss by renewal forgets nodes where a take got no answer.
func TestLossForgetsDoubt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		l, links := c.process(t)
		links[2].tune(func(l *link) { l.taking = 8 * time.Second })
		lk := acquire(t, l, "n")
		time.Sleep(time.Second)
		links[2].tune(func(l *link) { l.taking = 0 })
		c.nodes[1].wipe()
		<-lk.Context().Done()
		require.ErrorIs(t, lk.Release(t.Context()), lock.ErrLost)
		time.Sleep(7500*time.Millisecond - 3300*time.Millisecond + time.Second)
		settle(t, l)
		require.Equal(t, []string{"", "", ""}, c.holders())
	})
}

// a re-install without answer, another that works, the release succeeds there, and the first lands after it.
func TestLateInstallAfterASuccessfulRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		l, links := c.process(t)
		lk := acquire(t, l, "n")
		time.Sleep(time.Second)
		c.nodes[0].wipe()
		links[0].tune(func(l *link) { l.taking = 8 * time.Second })
		time.Sleep(3 * time.Second) // first renewal: sent at 3.3 s, lands at 11.3 s
		links[0].tune(func(l *link) { l.taking = 0 })
		time.Sleep(4 * time.Second) // second
		require.NotEmpty(t, c.holders()[0])
		release(t, lk)
		time.Sleep(3800 * time.Millisecond)
		settle(t, l)
		require.Equal(t, []string{"", "", ""}, c.holders())
	})
}

// the doubt of a later take ends with that of the first.
func TestDoubtEndsTooEarly(t *testing.T) {
	for _, first := range []time.Duration{time.Hour, 0} { // whether there was an install of unknown outcome before
		t.Run(first.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(3)
				l, links := c.process(t)
				lk := acquire(t, l, "n")
				time.Sleep(time.Second)
				c.nodes[0].wipe()
				links[0].tune(func(l *link) { l.taking = first })
				time.Sleep(11500 * time.Millisecond) // renewals at about 3.3, 6.5, 9.8
				c.nodes[0].wipe()
				links[0].tune(func(l *link) { l.taking = 8 * time.Second })
				time.Sleep(2500 * time.Millisecond) // and 13.0: lands at 21
				require.Empty(t, c.holders()[0])
				release(t, lk)
				links[0].tune(func(l *link) { l.taking = 0 })
				settle(t, l)
				for range 10 {
					time.Sleep(time.Second)
					settle(t, l)
					require.Equal(t, []string{"", "", ""}, c.holders())
				}
			})
		})
	}
}

// Renew that begins after Release has begun.
func TestRenewAfterReleaseInstalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		s, links := c.store(t)
		_, err := s.Acquire(t.Context(), req("T"))
		require.NoError(t, err)
		time.Sleep(100 * time.Millisecond)
		c.nodes[0].wipe()
		for _, l := range links[1:] {
			l.tune(func(l *link) { l.least = 100 * time.Millisecond })
		}
		links[0].tune(func(l *link) { l.taking = 300 * time.Millisecond })
		var released atomic.Bool
		go func() {
			released.Store(true) // as the Locker does before
			_, _ = s.Release(context.Background(), req("T"))
		}()
		time.Sleep(50 * time.Millisecond)
		for _, l := range links[1:] {
			l.tune(func(l *link) { l.least = 0 })
		}
		r := req("T")
		r.Live = func() bool { return !released.Load() }
		s.Renew(t.Context(), []lock.Request{r}, func(int, lock.Reply, error) {})
		time.Sleep(2 * time.Second)
		require.Equal(t, []string{"", "", ""}, c.holders(), "never after Release has begun")
	})
}

// done may be called from several goroutines.
type wide struct{ *link }

func (w wide) Renew(ctx context.Context, rs []lock.Request, done func(int, lock.Reply, error)) {
	var wg sync.WaitGroup
	for i := range rs {
		wg.Go(func() {
			w.link.Renew(ctx, rs[i:i+1], func(_ int, r lock.Reply, err error) { done(i, r, err) })
		})
	}
	wg.Wait()
}

func TestRenewOfAClusterIsNoRace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		stores := make([]lock.Store, 3)
		for i, n := range c.nodes {
			stores[i] = wide{&link{memory: n, rnd: rand.New(rand.NewPCG(1, 0)), slow: time.Millisecond}}
		}
		s := redlock.Quorum(stores)
		var rs []lock.Request
		for i := range 20 {
			r := req(fmt.Sprint("T", i))
			r.Key.Lock = fmt.Sprint("lock:", i)
			_, err := s.Acquire(t.Context(), r)
			require.NoError(t, err)
			rs = append(rs, r)
		}
		s.Renew(t.Context(), rs, func(int, lock.Reply, error) {})
		require.NoError(t, s.Wait(t.Context()))
	})
}

// what a node that has not told yet says of another release within 4 ms is swallowed.
type mouth struct {
	*link
	wake func(string)
}

func (m *mouth) Listen(_ context.Context, _ lock.Key, wake func(string)) (func(), error) {
	m.wake = wake
	return func() {}, nil
}

func TestAnotherReleaseIsHeard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ms []*mouth
		var stores []lock.Store
		for range 3 {
			m := &mouth{link: &link{memory: newMemory(0), rnd: rand.New(rand.NewPCG(1, 0))}}
			ms, stores = append(ms, m), append(stores, m)
		}
		s := redlock.Quorum(stores)
		heard := make(chan string, 10)
		stop, err := s.Listen(t.Context(), lock.Key{Lock: "lock:n"}, func(from string) { heard <- from })
		require.NoError(t, err)
		synctest.Wait()
		ms[0].wake("mine")
		ms[1].wake("mine") // decided: told
		ms[2].wake("")     // may have missed one
		time.Sleep(time.Second)
		stop()
		require.NoError(t, s.Wait(t.Context()))
		require.Equal(t, "mine", <-heard)
		require.Equal(t, "", <-heard)
	})
}

// the caller's deadline strikes in the second round of a fenced acquire.
func TestDeadlineInTheWriteBackIsNoLackOfQuorum(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		l, links := c.process(t, lock.WithFencing())
		c.setCounters(0, 5, 9)
		for _, l := range links {
			l.renewal = 100 * time.Millisecond
		}
		_, err := l.Acquire(timeout(t, 50*time.Millisecond), "n")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NotErrorIs(t, err, redlock.ErrNoQuorum, "all nodes can be reached")
	})
}

// with a long TTL a renewal stays at the silent node for a third of it.
func TestNothingIsLeftOnTheSilentNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		l, links := c.process(t, lock.WithTTL(time.Hour))
		lk := acquire(t, l, "n")
		time.Sleep(time.Second)
		cut(links, 0)
		require.NoError(t, lk.Extend(t.Context(), time.Hour))
		time.Sleep(10 * time.Second)
		links[0].mu.Lock()
		busy := links[0].busy
		links[0].mu.Unlock()
		cut(links)
		release(t, lk)
		time.Sleep(time.Hour)
		require.Zero(t, busy, "calls still under way at the silent node after 10 s")
	})
}

// no quorum is possible any more, but the silent node is waited for.
func TestARefusalDoesNotWaitForTheSilentNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		l, links := c.process(t, lock.WithTTL(20*time.Second))
		c.nodes[0].mu.Lock()
		c.nodes[0].leases["lock:n"] = memoryLease{"B's", time.Hour}
		c.nodes[0].mu.Unlock()
		c.nodes[1].crash()
		cut(links, 2)
		start := time.Now()
		_, _ = l.TryAcquire(t.Context(), "n")
		took := time.Since(start)
		cut(links)
		c.nodes[1].start()
		require.Less(t, took, 100*time.Millisecond)
	})
}

// real clients: Extend and a silent majority.
func TestExtendObeysContextOverClients(t *testing.T) {
	inVirtualTime(t, 3, func(t *testing.T, w *world) {
		l := w.locker(t)
		lk := acquire(t, l, "n")
		synctest.Wait()
		w.proxies[0].Silence()
		w.proxies[1].Silence()
		start := time.Now()
		_ = lk.Extend(timeout(t, 100*time.Millisecond), 10*time.Second)
		took := time.Since(start)
		w.proxies[0].Heal()
		w.proxies[1].Heal()
		_ = lk.Release(context.Background())
		require.Less(t, took, 200*time.Millisecond)
	})
}

// real clients: Do of a lost lock while one node resets connections.
func TestLostIsToldOverClients(t *testing.T) {
	inVirtualTime(t, 3, func(t *testing.T, w *world) {
		l := w.locker(t)
		err := l.Do(t.Context(), "n", func(context.Context) error {
			synctest.Wait()
			w.minis[1].FlushAll()
			w.minis[2].FlushAll()
			w.proxies[0].On(redistest.Cmd("EVAL", "EVALSHA"), redistest.DropReply())
			w.proxies[1].Latency(5 * time.Millisecond)
			w.proxies[2].Latency(5 * time.Millisecond)
			return nil
		})
		for _, p := range w.proxies {
			p.Heal()
			p.Latency(0)
		}
		require.ErrorIs(t, err, lock.ErrLost)
	})
}

// real clients: node 0 asks for a password.
func TestOneNodeWithAnotherPassword(t *testing.T) {
	inVirtualTime(t, 3, func(t *testing.T, w *world) {
		other := w.direct(t)
		lk := acquire(t, other, "n")
		synctest.Wait()
		w.minis[0].RequireAuth("secret")
		w.proxies[1].Latency(time.Millisecond)
		w.proxies[2].Latency(time.Millisecond)
		l := w.locker(t)
		time.AfterFunc(time.Second, func() { _ = lk.Release(context.Background()) })
		mine, err := l.Acquire(timeout(t, time.Minute), "n")
		w.minis[0].RequireAuth("")
		if err == nil {
			release(t, mine)
		}
		time.Sleep(2 * time.Second)
		require.NoError(t, err)
	})
}

// MinHold: a node that is away at the release keeps the key beyond it.
func TestMinHoldIsNotProlongedByTheCleanUp(t *testing.T) {
	inVirtualTime(t, 3, func(t *testing.T, w *world) {
		l := w.locker(t, lock.WithMinHold(8*time.Second))
		lk := acquire(t, l, "n")
		synctest.Wait()
		w.proxies[2].RefuseAll()
		w.proxies[2].Cut()
		release(t, lk)
		time.Sleep(6 * time.Second)
		w.proxies[2].Heal()
		time.Sleep(2*time.Second + 2100*time.Millisecond) // 8 s are over, and the TTL of 10 s
		require.Equal(t, 0, w.holding("n"))
	})
}

// waiting: only one node of five tells (the others' messages are lost).
func TestOneNodeThatTellsIsEnough(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(5)
		other, _ := c.process(t)
		l, _ := c.process(t)
		lk := acquire(t, other, "n")
		done := make(chan time.Time, 1)
		go func() {
			mine, err := l.Acquire(context.Background(), "n")
			done <- time.Now()
			if err == nil {
				_ = mine.Release(context.Background())
			}
		}()
		time.Sleep(3100 * time.Millisecond)
		for _, n := range c.nodes[1:] {
			n.mu.Lock()
			n.ears = map[string]map[*func(string)]bool{}
			n.mu.Unlock()
		}
		start := time.Now()
		release(t, lk)
		require.Less(t, (<-done).Sub(start), 50*time.Millisecond)
	})
}

// two takes of unknown outcome at one node, one release.
func TestTwoLateTakesOfOneToken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		s, links := c.store(t)
		links[2].tune(func(l *link) { l.taking = 3 * time.Second })
		_, err := s.Acquire(t.Context(), req("T"))
		require.NoError(t, err)
		time.Sleep(time.Second)
		links[2].tune(func(l *link) { l.taking = 8 * time.Second })
		r := req("T")
		r.Again, r.Used = true, true
		_, err = s.Acquire(t.Context(), r)
		require.NoError(t, err)
		time.Sleep(time.Second)
		_, err = s.Release(t.Context(), req("T"))
		require.NoError(t, err)
		time.Sleep(7500 * time.Millisecond)
		require.Equal(t, []string{"", "", ""}, c.holders())
	})
}

// prolong: the second round fails: what does Renew say?
func TestProlongOfUnknownOutcome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		s, links := c.store(t)
		r := req("T")
		r.Key.Fence, r.Fence = "fence:{lock:n}:n", lock.FenceCounter
		_, err := s.Acquire(t.Context(), r)
		require.NoError(t, err)
		time.Sleep(time.Second)
		c.setCounters(10, 20, 30)
		r.Count = 16
		go func() {
			time.Sleep(2100 * time.Microsecond)
			c.nodes[0].wipe()
			c.nodes[1].wipe()
			c.nodes[2].wipe()
		}()
		for _, l := range links {
			l.tune(func(l *link) { l.least, l.slow = time.Millisecond, 0 })
		}
		s.Renew(t.Context(), []lock.Request{r}, func(_ int, _ lock.Reply, e error) { err = e })
		require.ErrorIs(t, err, lock.ErrLost)
		require.NotErrorIs(t, err, redlock.ErrNoQuorum)
	})
}

// waiters of many names at a silent node: how many calls are under way there?
func TestListeningAtASilentNodeIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		other, _ := c.process(t)
		l, links := c.process(t)
		cut(links, 0)
		var held []*lock.Lock
		for i := range 1500 {
			held = append(held, acquire(t, other, fmt.Sprint(i)))
		}
		time.Sleep(time.Second)
		var wg sync.WaitGroup
		for i := range 1500 {
			if i%100 == 0 {
				time.Sleep(50 * time.Millisecond)
			}
			wg.Go(func() {
				lk, err := l.Acquire(context.Background(), fmt.Sprint(i))
				if err == nil {
					_ = lk.Release(context.Background())
				}
			})
		}
		time.Sleep(20 * time.Millisecond)
		links[0].mu.Lock()
		most := links[0].most
		links[0].mu.Unlock()
		for _, lk := range held {
			_ = lk.Release(context.Background())
		}
		wg.Wait()
		cut(links)
		require.LessOrEqual(t, most, redlock.InFlight+8)
	})
}

// through the Locker: a waiter is cancelled at the very instant of the grant, the next asks with the same token, and
// two nodes refuse for a moment.
func TestNextInLineAdoptsATokenThatIsThenSpent(t *testing.T) {
	for range 20 {
		synctest.Test(t, func(t *testing.T) {
			c := newCluster(3)
			l, links := c.process(t)
			for _, k := range links {
				k.least, k.slow = 10*time.Millisecond, 0
			}
			first, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
			defer cancel()
			go func() {
				if lk, err := l.Acquire(first, "n"); err == nil {
					_ = lk.Release(context.Background())
				}
			}()
			time.Sleep(time.Millisecond)
			second, cancel2 := context.WithTimeout(context.Background(), 60*time.Millisecond)
			defer cancel2()
			time.AfterFunc(19500*time.Microsecond, func() {
				for _, k := range links[1:] {
					k.tune(func(l *link) { l.refusal = errRefused })
				}
			})
			mine, err := l.Acquire(second, "n")
			time.Sleep(50 * time.Millisecond)
			for _, k := range links {
				k.tune(func(l *link) { l.refusal = nil })
			}
			time.Sleep(time.Second)
			if err == nil {
				release(t, mine)
				return
			}
			require.Equal(t, []string{"", "", ""}, c.holders())
		})
	}
}

// Without a quorum of true extends nothing is installed anywhere.
func TestNoInstallWithoutAQuorumOfExtends(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(5)
		s, links := c.store(t)
		_, err := s.Acquire(t.Context(), req("T"))
		require.NoError(t, err)
		time.Sleep(100 * time.Millisecond)
		c.nodes[3].wipe()
		c.nodes[4].wipe()
		cut(links, 1, 2)
		s.Renew(t.Context(), []lock.Request{req("T")}, func(_ int, _ lock.Reply, e error) { err = e })
		require.ErrorIs(t, err, lock.ErrUnknown)
		require.Equal(t, []string{"T", "T", "T", "", ""}, c.holders())
		cut(links)
		time.Sleep(time.Second)
		require.Equal(t, []string{"T", "T", "T", "", ""}, c.holders())
	})
}

func TestEachNodesErrorIsFound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		l, links := c.process(t)
		one, two := errors.New("one"), errors.New("two")
		links[1].tune(func(l *link) { l.refusal = one })
		links[2].tune(func(l *link) { l.refusal = two })
		_, err := l.TryAcquire(t.Context(), "n")
		require.ErrorIs(t, err, redlock.ErrNoQuorum)
		require.ErrorIs(t, err, one)
		require.ErrorIs(t, err, two)
		nodes := redlock.NodeErrors(err)
		require.Len(t, nodes, 2)
		require.Equal(t, redlock.NodeError{Node: 2, Err: two}, *nodes[1])
	})
}

// a minority that refuses for good, while the majority is only away: is it permanent? (Release, Extend)
func TestExtendAndOneForbiddenNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		l, links := c.process(t)
		lk := acquire(t, l, "n")
		links[0].tune(func(l *link) { l.refusal = lock.Permanent(errors.New("NOPERM")) })
		links[1].tune(func(l *link) { l.refusal = errRefused })
		restore := func() { links[1].tune(func(l *link) { l.refusal = nil }) }
		done := make(chan error, 1)
		go func() { done <- lk.Extend(t.Context(), ttl) }()
		synctest.Wait()
		restore()
		err := <-done
		links[0].tune(func(l *link) { l.refusal = nil })
		release(t, lk)
		require.NoError(t, err, "it is tried again for about a second")
	})
}

// Two of five say that it is lost, and two do not answer: nothing is known.
func TestALossTakesAQuorumOfLosses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(5)
		s, links := c.store(t)
		_, err := s.Acquire(t.Context(), req("T"))
		require.NoError(t, err)
		time.Sleep(100 * time.Millisecond)
		c.nodes[0].wipe()
		c.nodes[1].wipe()
		cut(links, 2, 3)
		s.Renew(t.Context(), []lock.Request{req("T")}, func(_ int, _ lock.Reply, e error) { err = e })
		require.ErrorIs(t, err, lock.ErrUnknown)
		require.NotErrorIs(t, err, lock.ErrLost)
		cut(links)
	})
}

// A node that has not answered the vote gets the command after the lock was released.
func TestAReleaseKnowsOfTakesWithoutAnAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		l, links := c.process(t)
		links[2].tune(func(l *link) { l.taking = 8 * time.Second })
		lk := acquire(t, l, "n")
		time.Sleep(2 * time.Second) // the call is over
		release(t, lk)
		time.Sleep(7 * time.Second)
		settle(t, l)
		require.Equal(t, []string{"", "", ""}, c.holders())
	})
}

// A prolongation that loses to the release of its own lease gave the token up too; the release then found it gone.
func TestAProlongationThatTheReleaseOvertakesGivesNothingUp(t *testing.T) {
	for _, live := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			var ms []*memory
			var stores []lock.Store
			for range 5 {
				m := &mouth{link: &link{memory: newMemory(0), rnd: rand.New(rand.NewPCG(1, 0))}}
				ms, stores = append(ms, m.memory), append(stores, m)
			}
			s := redlock.Quorum(stores)
			for _, m := range ms[:2] { // the release has been to the others
				m.leases["lock:n"] = memoryLease{"token", time.Hour}
			}
			r := lock.Request{Key: lock.Key{Lock: "lock:n"}, Token: "token", TTL: time.Minute, Count: 16, Live: func() bool { return live }}
			s.Renew(t.Context(), []lock.Request{r}, func(_ int, _ lock.Reply, err error) { require.ErrorIs(t, err, lock.ErrLost) })
			require.NoError(t, s.Wait(t.Context()))
			for _, m := range ms[:2] {
				_, held := m.leases["lock:n"]
				require.Equal(t, !live, held)
			}
		})
	}
}
