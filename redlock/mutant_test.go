package redlock_test

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/internal/redistest"
	"github.com/seed-b640e7e9/lock/redlock"
)

// The rules in this file were found by breaking them: integration/mutants has the variants that nothing else noticed.

// The clocks of all nodes gain as much as the drift allows for, and the holder is cut off.
func TestAHolderIsToldBeforeClocksThatGainAPercentLetAnotherIn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(5)
		for _, n := range c.nodes {
			n.rate = 0.01
		}
		a, toA := c.process(t)
		b, _ := c.process(t)
		lk := acquire(t, a, "n")
		time.Sleep(ttl)
		cut(toA, 0, 1, 2, 3, 4)
		theirs := acquire(t, b, "n")
		valid, cause := lk.Valid(), context.Cause(lk.Context())
		release(t, theirs)
		cut(toA)
		require.False(t, valid, "two holders")
		require.ErrorIs(t, cause, lock.ErrLost)
	})
}

// TestASlowWriteBackDoesNotMakeAFenceComeTwice with the real script.
func TestASlowWriteBackOverMiniredisDoesNotMakeAFenceComeTwice(t *testing.T) {
	inVirtualTime(t, 5, func(t *testing.T, w *world) {
		for i, n := range []string{"0", "100", "100", "100", "0"} {
			require.NoError(t, w.minis[i].Set("fence:{lock:n}:n", n))
		}
		process := func(down ...int) (*lock.Locker, []*redistest.Proxy) {
			var proxies []*redistest.Proxy
			nodes := make([]redis.UniversalClient, len(w.minis))
			for i, m := range w.minis {
				p := redistest.ProxyMini(t, m)
				proxies = append(proxies, p)
				nodes[i] = p.Client(t, at(i), func(o *redis.Options) { o.ContextTimeoutEnabled = true })
			}
			for _, i := range down {
				proxies[i].RefuseAll()
			}
			return w.over(t, nodes, []lock.Option{lock.WithFencing()}), proxies
		}
		a, toA := process(2, 3)
		writeBack := func(args []string) bool { return redistest.Cmd("EVAL")(args) && len(args) == 10 } // it has the text once
		slow := toA[4].On(writeBack, redistest.DelayRequest(5*time.Second)).Times(1)
		_, err := a.TryAcquire(t.Context(), "n")
		require.ErrorContains(t, err, "not written back")
		require.Equal(t, 1, slow.Hits())
		time.Sleep(time.Second) // what it has taken is given back

		take := func(down ...int) lock.Fence {
			l, _ := process(down...)
			lk := acquire(t, l, "n")
			defer release(t, lk)
			return lk.Fence()
		}
		second := take(2, 3)
		require.Greater(t, second, lock.Fence(101))
		time.Sleep(6 * time.Second)
		require.Greater(t, take(0, 1), second)
	})
}

// recorded is a node that remembers which tokens a release was sent for, and which of them came again.
type recorded struct {
	lock.Store

	mu    sync.Mutex // guards all below
	given map[string]bool
	again int
}

func (r *recorded) Acquire(ctx context.Context, req lock.Request) (lock.Reply, error) {
	r.mu.Lock()
	if r.given[req.Token] {
		r.again++
	}
	r.mu.Unlock()
	return r.Store.Acquire(ctx, req)
}

func (r *recorded) Release(ctx context.Context, req lock.Request) (lock.Reply, error) {
	r.mu.Lock()
	r.given[req.Token] = true
	r.mu.Unlock()
	return r.Store.Release(ctx, req)
}

// Two nodes are held for a second, by one or by two who are stuck; each vote gets the third, and gives it back.
func TestNoVoteHasATokenThatWasGivenBack(t *testing.T) {
	for name, holders := range map[string][]string{"held": {"x", "x"}, "split": {"x", "y"}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(3)
				for i, token := range holders {
					c.nodes[i].leases["lock:n"] = memoryLease{token, time.Second}
				}
				stores := make([]lock.Store, len(c.nodes))
				for i, n := range c.nodes {
					l := &link{memory: n, rnd: rand.New(rand.NewPCG(1, uint64(i))), slow: time.Millisecond}
					stores[i] = &recorded{Store: l, given: map[string]bool{}}
				}
				l := redlock.Over(stores)
				release(t, acquire(t, l, "n"))
				settle(t, l)
				last := stores[2].(*recorded)
				require.Greater(t, len(last.given), 3)
				for _, s := range stores {
					require.Zero(t, s.(*recorded).again)
				}
			})
		})
	}
}

func TestNodesThatGetTheTokenAgainDoNotCountBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(5)
		l, _ := c.process(t)
		lk := acquire(t, l, "n")
		time.Sleep(10 * time.Millisecond) // until all five have it
		for _, n := range c.nodes[:3] {
			n.wipe()
		}
		time.Sleep(ttl / 2)
		lost := context.Cause(lk.Context())
		_ = lk.Release(t.Context())
		require.ErrorIs(t, lost, lock.ErrLost, "another may have been granted the lock by the three meanwhile")
	})
}
