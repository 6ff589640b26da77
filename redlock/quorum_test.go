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
	"github.com/seed-b640e7e9/lock/redlock"
)

// cluster is some nodes in memory; each process has links of its own to all of them.
type cluster struct{ nodes []*memory }

func newCluster(n int) *cluster {
	c := &cluster{}
	for range n {
		c.nodes = append(c.nodes, newMemory(0))
	}
	return c
}

func (c *cluster) process(t *testing.T, opts ...lock.Option) (*lock.Locker, []*link) {
	t.Helper()
	links := make([]*link, len(c.nodes))
	stores := make([]lock.Store, len(c.nodes))
	for i, n := range c.nodes {
		links[i] = &link{memory: n, rnd: rand.New(rand.NewPCG(rand.Uint64(), 0)), slow: time.Millisecond}
		stores[i] = links[i]
	}
	l := redlock.Over(stores, opts...)
	t.Cleanup(func() { settle(t, l) })
	return l, links
}

// cut makes nodes silent for one process, and all others well.
func cut(links []*link, nodes ...int) {
	for _, l := range links {
		l.set(time.Millisecond, 0)
	}
	for _, i := range nodes {
		links[i].set(time.Millisecond, 1)
	}
}

func (c *cluster) holders() (tokens []string) {
	for _, n := range c.nodes {
		token, _ := n.holder("n")
		tokens = append(tokens, token)
	}
	return tokens
}

func (c *cluster) setCounters(counters ...lock.Fence) {
	for i, f := range counters {
		c.nodes[i].mu.Lock()
		c.nodes[i].counters["fence:{lock:n}:n"] = f
		c.nodes[i].mu.Unlock()
	}
}

func TestHeldNoQuorumAndLateAreThreeErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		other, _ := c.process(t)
		l, links := c.process(t)
		lk := acquire(t, other, "n")
		_, err := l.TryAcquire(t.Context(), "n")
		require.ErrorIs(t, err, lock.ErrHeld)
		require.NotErrorIs(t, err, redlock.ErrNoQuorum)
		release(t, lk)

		c.nodes[0].crash()
		cut(links, 1)
		_, err = l.TryAcquire(t.Context(), "n")
		require.ErrorIs(t, err, redlock.ErrNoQuorum)
		require.NotErrorIs(t, err, lock.ErrHeld)
		require.NotErrorIs(t, err, lock.ErrUnknown, "what a silent node may yet do is taken back")
		require.ErrorIs(t, errors.Unwrap(err), redlock.ErrNoQuorum)
		var node *redlock.NodeError
		require.ErrorAs(t, err, &node)
		require.Zero(t, node.Node)
		require.Equal(t, errRefused, node.Err)
		c.nodes[0].start()

		cut(links)
		settle(t, l)
		for _, l := range links {
			l.least, l.slow = 24*time.Millisecond, 0
		}
		c.setCounters(0, 5, 9) // it takes two rounds
		ctx, cancel := context.WithTimeout(t.Context(), 97*time.Millisecond)
		defer cancel()
		_, err = l.With(lock.WithTTL(100*time.Millisecond), lock.WithFencing()).Acquire(ctx, "n")
		require.ErrorIs(t, err, lock.ErrUnknown)
		require.ErrorContains(t, err, "too late")
		require.NotErrorIs(t, err, lock.ErrHeld)
		require.NotErrorIs(t, err, redlock.ErrNoQuorum)
		settle(t, l)
		require.Equal(t, []string{"", "", ""}, c.holders())
	})
}

// With a TTL of 5 s a node that does not answer is given 250 ms.
func TestTwoSilentNodesOfThreeFailSoonAndLeaveNothing(t *testing.T) { // C30
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		l, links := c.process(t, lock.WithTTL(5*time.Second))
		lk := acquire(t, l, "n")
		cut(links, 0, 2)
		require.ErrorIs(t, lk.Extend(timeout(t, time.Second), 5*time.Second), lock.ErrUnknown)
		require.True(t, lk.Valid(), "nothing is known of a loss")
		cut(links)
		release(t, lk)
		cut(links, 0, 2)
		start := time.Now()
		_, err := l.TryAcquire(t.Context(), "n")
		require.ErrorIs(t, err, redlock.ErrNoQuorum)
		require.Less(t, time.Since(start), 500*time.Millisecond)
		time.Sleep(10 * time.Millisecond)
		require.Equal(t, []string{"", "", ""}, c.holders(), "long before the TTL")
		cut(links)
		settle(t, l)
	})
}

func timeout(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// A has the bare majority, as B had the other two nodes. B lets go, and a node of A's forgets.
func TestABareMajorityIsCompletedByTheNextRenewal(t *testing.T) { // C31
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(5)
		a, _ := c.process(t, lock.WithTTL(6*time.Second))
		b, toB := c.process(t, lock.WithTTL(6*time.Second))
		for _, n := range c.nodes[3:] {
			n.leases["lock:n"] = memoryLease{"B's", time.Hour}
		}
		lk := acquire(t, a, "n")
		mine := c.holders()[0]
		require.Equal(t, []string{mine, mine, mine, "B's", "B's"}, c.holders())
		for _, n := range c.nodes[3:] {
			n.mu.Lock()
			delete(n.leases, "lock:n")
			n.mu.Unlock()
		}
		time.Sleep(2100 * time.Millisecond)
		require.Equal(t, []string{mine, mine, mine, mine, mine}, c.holders())
		c.nodes[2].wipe()
		_, err := b.TryAcquire(t.Context(), "n")
		require.ErrorIs(t, err, lock.ErrHeld)
		require.True(t, lk.Valid())

		// And where the majority is lost before that, A hears of it, and leaves B's nodes alone.
		for _, n := range c.nodes[1:] {
			n.wipe()
		}
		cut(toB, 0)
		theirs := acquire(t, b, "n")
		<-lk.Context().Done()
		require.ErrorIs(t, context.Cause(lk.Context()), lock.ErrLost)
		require.ErrorIs(t, lk.Release(t.Context()), lock.ErrLost)
		require.True(t, theirs.Valid())
		time.Sleep(time.Second)
		now := c.holders()
		require.NotEqual(t, mine, now[1])
		require.Equal(t, []string{now[1], now[1], now[1], now[1]}, now[1:])
		release(t, theirs)
	})
}

func TestOfSeveralThatTryAtTheSameTimeOneGetsTheLock(t *testing.T) {
	for _, n := range []int{3, 5} {
		for _, contenders := range []int{2, 5, 20} {
			const runs = 50
			won, votes, most := 0, 0, 0
			for range runs {
				synctest.Test(t, func(t *testing.T) {
					c := newCluster(n)
					var got, failed atomic.Int32
					var wg sync.WaitGroup
					for range contenders {
						l, links := c.process(t)
						for _, l := range links {
							l.least = 100 * time.Microsecond
						}
						wg.Go(func() {
							switch _, err := l.TryAcquire(context.Background(), "n"); {
							case err == nil:
								got.Add(1)
							case !errors.Is(err, lock.ErrHeld):
								failed.Add(1)
							}
						})
					}
					wg.Wait()
					require.LessOrEqual(t, got.Load(), int32(1))
					require.Zero(t, failed.Load(), "a vote that stays split is told as such, but does not happen here")
					won += int(got.Load())
					c.nodes[0].mu.Lock()
					votes += c.nodes[0].takes
					most = max(most, c.nodes[0].takes)
					c.nodes[0].mu.Unlock()
					for _, n := range c.nodes {
						n.crash() // the lock is not released: it is lost
					}
				})
			}
			t.Logf("%d nodes, %d contenders: %.1f votes each at the mean, %.1f in the worst of %d runs", n, contenders,
				float64(votes)/runs/float64(contenders), float64(most)/float64(contenders), runs)
			require.Equal(t, runs, won, "%d nodes, %d contenders", n, contenders)
		}
	}
}

// The counters of five nodes stand at 0, 100, 100, 100 and 0. A's vote is that of nodes 0, 1 and 4, and its write-back to
// node 4 is slow: A gives up. C gets the lock by the same nodes. Then A's request arrives, and D gets it by 2, 3 and 4.
func TestASlowWriteBackDoesNotMakeAFenceComeTwice(t *testing.T) {
	for name, blind := range map[string]bool{"as it is": false, "with nodes that write back whoever holds the key": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(5)
				c.setCounters(0, 100, 100, 100, 0)
				for _, n := range c.nodes {
					n.blind = blind
				}
				a, toA := c.process(t, lock.WithFencing())
				cut(toA, 2, 3)
				toA[4].renewal = 5 * time.Second
				_, err := a.TryAcquire(t.Context(), "n")
				require.ErrorContains(t, err, "not written back")
				time.Sleep(time.Second) // what it has taken is given back

				take := func(down ...int) lock.Fence {
					l, links := c.process(t, lock.WithFencing())
					cut(links, down...)
					lk := acquire(t, l, "n")
					defer release(t, lk)
					return lk.Fence()
				}
				second := take(2, 3)
				require.Greater(t, second, lock.Fence(101))
				time.Sleep(6 * time.Second)
				third := take(0, 1)
				if blind {
					require.Equal(t, second, third, "the number comes twice: else this test shows nothing")
				} else {
					require.Greater(t, third, second)
				}
			})
		})
	}
}

// Node 2 has missed the grants, and node 1, one of the two that had agreed on the last fence, loses its counter.
func TestAfterOneCounterIsWipedThePlainFenceMayGoBackAndTheClockMayNot(t *testing.T) {
	for name, o := range map[string]struct {
		fence lock.Option
		rises bool
	}{"plain": {lock.WithFencing(), false}, "clock": {lock.WithClockFencing(), true}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(3)
				l, links := c.process(t, o.fence)
				cut(links, 2)
				var last lock.Fence
				for range 5 {
					lk := acquire(t, l, "n")
					last = lk.Fence()
					release(t, lk)
				}
				c.nodes[1].wipe()
				time.Sleep(time.Second)
				cut(links, 0)
				lk := acquire(t, l, "n")
				require.Equal(t, o.rises, lk.Fence() > last, "%d after %d", lk.Fence(), last)
				release(t, lk)
				cut(links)
			})
		})
	}
}

func TestFencesThatAgreeTakeOneRound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(5)
		l, links := c.process(t, lock.WithFencing())
		for _, l := range links {
			l.renewal = time.Minute
		}
		for i := range 5 {
			lk := acquire(t, l, "n")
			require.Equal(t, lock.Fence(i+1), lk.Fence())
			release(t, lk)
			settle(t, l) // at all nodes
		}
	})
}

func TestCommandsToASilentNodeAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		l, links := c.process(t)
		cut(links, 0)
		var wg sync.WaitGroup
		for i := range 3 * redlock.InFlight {
			if i%100 == 0 {
				time.Sleep(25 * time.Millisecond)
			}
			wg.Go(func() {
				start := time.Now()
				lk, err := l.Acquire(context.Background(), fmt.Sprint(i))
				if err == nil {
					err = lk.Release(context.Background())
				}
				if err != nil {
					t.Error(err)
				}
				if took := time.Since(start); took > 10*time.Millisecond {
					t.Errorf("%v, although the others decide", took)
				}
			})
		}
		wg.Wait()
		require.Greater(t, links[0].most, redlock.InFlight-10, "there was something to bound")
		require.LessOrEqual(t, links[0].most, redlock.InFlight+8, "with what cleans up")
		cut(links)
	})
}

func TestAMajorityThatRefusesForGoodEndsTheWaiting(t *testing.T) {
	for refusing, waits := range map[int]bool{1: false, 2: true} {
		synctest.Test(t, func(t *testing.T) {
			c := newCluster(3)
			l, links := c.process(t)
			for _, l := range links[:refusing] {
				l.refusal = lock.Permanent(errors.New("NOPERM"))
			}
			lk, err := l.Acquire(timeout(t, time.Hour), "n")
			if !waits {
				require.NoError(t, err)
				release(t, lk)
				return
			}
			require.ErrorIs(t, err, redlock.ErrNoQuorum)
			require.ErrorContains(t, err, "NOPERM")
			require.NotErrorIs(t, err, context.DeadlineExceeded)
		})
	}
}

func TestAReleaseThatIsFinishedInTheBackgroundIsNoLoss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		l, _ := c.process(t)
		lk := acquire(t, l, "n")
		time.Sleep(time.Second)
		for _, n := range c.nodes {
			n.crash()
			time.AfterFunc(49*time.Millisecond, n.start) // just before the clean-up tries again, and Release does
		}
		require.NoError(t, lk.Release(t.Context()))
		require.Equal(t, []string{"", "", ""}, c.holders())
	})
}

func TestALostLeaseIsTakenFromTheNodesThatStillHaveIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		l, _ := c.process(t)
		lk := acquire(t, l, "n")
		time.Sleep(time.Second)
		c.nodes[0].wipe()
		c.nodes[1].wipe()
		<-lk.Context().Done()
		require.ErrorIs(t, context.Cause(lk.Context()), lock.ErrLost)
		settle(t, l)
		require.Equal(t, []string{"", "", ""}, c.holders())
	})
}

// The holder has nodes 0 and 1, and node 0 does not answer: what node 1 says again and again is no split vote.
func TestOneWhoHoldsWhereTooFewNodesCanTellHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		l, links := c.process(t)
		for _, n := range c.nodes[:2] {
			n.leases["lock:n"] = memoryLease{"B's", time.Hour}
		}
		cut(links, 0)
		_, err := l.TryAcquire(t.Context(), "n")
		require.ErrorIs(t, err, lock.ErrHeld)
		require.NotErrorIs(t, err, redlock.ErrSplit)
		require.NotEmpty(t, redlock.NodeErrors(err))
		cut(links)
	})
}

// The first answer of a held lock says so, and the others take longer than slow nodes are waited for otherwise.
func TestALockThatIsHeldFarAwayIsHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		other, _ := c.process(t)
		l, links := c.process(t)
		lk := acquire(t, other, "n")
		time.Sleep(time.Second)
		for _, far := range links[1:] {
			far.tune(func(l *link) { l.least = 60 * time.Millisecond })
		}
		_, err := l.TryAcquire(t.Context(), "n")
		require.ErrorIs(t, err, lock.ErrHeld)
		release(t, lk)
	})
}
