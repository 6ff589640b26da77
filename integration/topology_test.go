package integration

import (
	"context"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/integration/history"
	"github.com/seed-b640e7e9/lock/internal/redistest"
)

// ask asks one server something, as an operator does.
func ask(t *testing.T, s *redistest.Server, args ...any) string {
	t.Helper()
	rdb := redis.NewClient(&redis.Options{Addr: s.Addr()})
	defer rdb.Close()
	v, err := rdb.Do(context.Background(), args...).Result()
	require.NoError(t, err, "%v", args)
	text, _ := v.(string)
	return text
}

// lasting is a TTL that is not over when a replica has taken over, nor is a third of it, after which the holder hears.
const lasting = 15 * time.Second

// clusterFaults are rows on a cluster of three primaries.
func clusterFaults(t *testing.T) (results []result) {
	rows := []row{
		{fault: "cluster: slots move (MOVED, ASK)"},
		{fault: "cluster: a primary killed, its replica takes over", overlap: true},
		{fault: "cluster: the same, while leases last that the replica lacks", overlap: true, second: true, shows: []string{"release lock lost"}},
	}
	for _, r := range rows {
		t.Run(r.fault, func(t *testing.T) {
			c := redistest.StartCluster(t, redistest.Redis7, 3)
			n := &nemesis{world: worldOf(t, r.config(), c.Client(t))}
			n.config.Addr, n.config.Cluster = c.Servers[0].Addr(), true
			r.make = func(n *nemesis) {
				for range 3 {
					for _, name := range n.names() {
						moveSlot(t, c, "lock:"+name)
					}
				}
			}
			if r.overlap {
				r.make = takeover(n, c, r.second)
			}
			results = append(results, n.suffer(r))
		})
	}
	return results
}

// takeover prepares the end of the primary that has all Kept names, whose replica takes over with their locks or without.
func takeover(n *nemesis, c *redistest.Cluster, lacks bool) func(*nemesis) {
	t := n.t
	t.Helper()
	n.config.Kept = []string{"{k}1", "{k}2"}
	primary := serverOf(t, c, "lock:{k}")
	if primary == c.Servers[0] { // the workers may still have to ask that one
		n.config.Addr = c.Servers[1].Addr()
	}
	replica := addReplica(t, c, primary)
	if lacks {
		separate(t, primary, replica)
	}
	return func(n *nemesis) {
		if lacks {
			requireLacks(t, primary, replica)
		}
		killed := history.Now()
		primary.Kill()
		awaitInfo(t, replica, "role:master")
		if lacks {
			n.awaitHeard(killed)
		}
	}
}

// serverOf returns the primary of a key.
func serverOf(t *testing.T, c *redistest.Cluster, key string) *redistest.Server {
	t.Helper()
	node, err := c.Client(t).MasterForKey(context.Background(), key)
	require.NoError(t, err)
	for _, s := range c.Servers {
		if s.Addr() == node.Options().Addr {
			return s
		}
	}
	t.Fatalf("no server of %s", key)
	return nil
}

// moveSlot moves the slot of a key to the next primary, key by key, while it is in use.
func moveSlot(t *testing.T, c *redistest.Cluster, key string) {
	t.Helper()
	from := serverOf(t, c, key)
	to := c.Servers[0]
	for i, s := range c.Servers {
		if s == from {
			to = c.Servers[(i+1)%len(c.Servers)]
		}
	}
	rdb := redis.NewClient(&redis.Options{Addr: from.Addr()})
	defer rdb.Close()
	ctx := context.Background()
	slot := strconv.FormatInt(rdb.ClusterKeySlot(ctx, key).Val(), 10)
	host, port, _ := net.SplitHostPort(to.Addr())
	ask(t, to, "CLUSTER", "SETSLOT", slot, "IMPORTING", ask(t, from, "CLUSTER", "MYID"))
	ask(t, from, "CLUSTER", "SETSLOT", slot, "MIGRATING", ask(t, to, "CLUSTER", "MYID"))
	sleep(20 * time.Millisecond) // commands meet the slot while it is on its way
	n, _ := strconv.Atoi(slot)
	for {
		keys, err := rdb.ClusterGetKeysInSlot(ctx, n, 100).Result()
		require.NoError(t, err)
		if len(keys) == 0 {
			break
		}
		for _, k := range keys {
			_ = rdb.Do(ctx, "MIGRATE", host, port, k, 0, 5000).Err() // it may be gone by now
		}
	}
	for _, s := range []*redistest.Server{to, from} {
		ask(t, s, "CLUSTER", "SETSLOT", slot, "NODE", ask(t, to, "CLUSTER", "MYID"))
	}
}

// addReplica gives a primary a replica, and waits until that has all data and all nodes know it.
func addReplica(t *testing.T, c *redistest.Cluster, primary *redistest.Server) *redistest.Server {
	t.Helper()
	r := redistest.StartNode(t, redistest.Redis7)
	for _, s := range append([]*redistest.Server{r}, c.Servers...) {
		// They talk to each other twice within the timeout; and a primary waits for further replicas before it copies its data.
		ask(t, s, "CONFIG", "SET", "cluster-node-timeout", "500", "repl-diskless-sync-delay", "0")
	}
	host, port, _ := net.SplitHostPort(primary.Addr())
	ask(t, r, "CLUSTER", "MEET", host, port, primary.BusPort())
	id := ask(t, primary, "CLUSTER", "MYID")
	rdb := redis.NewClient(&redis.Options{Addr: r.Addr()})
	defer rdb.Close()
	require.Eventually(t, func() bool { return rdb.Do(context.Background(), "CLUSTER", "REPLICATE", id).Err() == nil },
		20*time.Second, 50*time.Millisecond)
	awaitInfo(t, r, "master_link_status:up")
	for _, s := range c.Servers {
		require.Eventually(t, func() bool {
			return strings.Contains(ask(t, s, "CLUSTER", "NODES"), "slave "+id)
		}, 20*time.Second, 20*time.Millisecond)
	}
	return r
}

// awaitInfo waits until a server says something of its replication.
func awaitInfo(t *testing.T, s *redistest.Server, text string) {
	t.Helper()
	require.Eventually(t, func() bool { return strings.Contains(ask(t, s, "INFO", "replication"), text) }, 20*time.Second, 20*time.Millisecond)
}

// separate ends replication for good: the replica does not get in any more. For all others it is alive, so it may take over.
func separate(t *testing.T, primary, replica *redistest.Server) {
	t.Helper()
	ask(t, replica, "CONFIG", "SET", "masterauth", "wrong")
	rdb := redis.NewClient(&redis.Options{Addr: primary.Addr()})
	defer rdb.Close()
	require.NoError(t, rdb.Do(context.Background(), "CLIENT", "KILL", "TYPE", "replica").Err())
	awaitInfo(t, replica, "master_link_status:down")
}

// requireLacks sees that there are locks, and that a replica does not know them.
func requireLacks(t *testing.T, primary, replica *redistest.Server) {
	t.Helper()
	held := func(s *redistest.Server) int {
		rdb := redis.NewClient(&redis.Options{Addr: s.Addr()})
		defer rdb.Close()
		return len(rdb.Keys(context.Background(), "lock:*k*").Val())
	}
	require.NotZero(t, held(primary))
	require.Zero(t, held(replica))
}

// awaitHeard waits until all who held one of Kept at that time have heard that they do not any more, or have given it up.
func (n *nemesis) awaitHeard(since time.Duration) {
	n.t.Helper()
	require.Eventually(n.t, func() bool { return n.holders(since) == 0 }, lasting+time.Second, 50*time.Millisecond)
}

// holders counts those who held one of Kept then, and believe that they still do.
func (n *nemesis) holders(then time.Duration) int {
	n.world.mu.Lock()
	defer n.world.mu.Unlock()
	type id struct{ worker, grant int }
	held := map[id]bool{}
	for _, e := range n.events {
		switch {
		case e.Kind == history.Acquired && e.At < then && slices.Contains(n.config.Kept, e.Name):
			held[id{e.Worker, e.Grant}] = true
		case e.Kind == history.Lost || e.Kind == history.Release:
			delete(held, id{e.Worker, e.Grant})
		}
	}
	return len(held)
}

// sentinelFaults are failovers with locks on the side that is lost: the primary is stopped, and comes back as a replica; or it is
// killed, while leases last that the replica lacks.
func sentinelFaults(t *testing.T) (results []result) {
	rows := []row{
		{fault: "Sentinel: failover, the lock on the lost side", overlap: true},
		{fault: "Sentinel: failover, while leases last that the replica lacks", overlap: true, second: true, shows: []string{"release lock lost"}},
	}
	for _, r := range rows {
		t.Run(r.fault, func(t *testing.T) {
			s := redistest.StartSentinel(t)
			config := r.config()
			config.Addr, config.Sentinel = s.Sentinel.Addr(), redistest.SentinelName
			n := &nemesis{world: worldOf(t, config, s.Client(t))}
			old, replica := s.Primary(t), s.Replica(t)
			if r.second {
				ask(t, s.Sentinel, "SENTINEL", "SET", redistest.SentinelName, "down-after-milliseconds", "500")
				separate(t, old, replica)
				r.make = func(*nemesis) {
					requireLacks(t, old, replica)
					killed := history.Now()
					old.Kill()
					s.AwaitFailover(t, old)
					n.awaitHeard(killed)
				}
			} else {
				r.make = func(*nemesis) {
					ask(t, replica, "CONFIG", "SET", "repl-timeout", "3600")
					old.Pause()
					s.AwaitFailover(t, old)
					old.Resume()
					sleep(time.Second)
				}
			}
			results = append(results, n.suffer(r))
		})
	}
	return results
}

// A lock whose primary dies is renewed at the replica that takes over and knows it. go-redis alone would go on asking the dead
// one for a minute.
func TestALockOutlivesItsPrimary(t *testing.T) {
	const ttl = 8 * time.Second
	c := redistest.StartCluster(t, redistest.Redis7, 3)
	primary := serverOf(t, c, "lock:n")
	replica := addReplica(t, c, primary)
	rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{c.Servers[0].Addr(), c.Servers[1].Addr(), c.Servers[2].Addr()}, ContextTimeoutEnabled: true})
	defer rdb.Close()
	l := lock.New(rdb, lock.WithTTL(ttl))
	lk, err := l.Acquire(t.Context(), "n")
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		return strings.Contains(ask(t, replica, "INFO", "keyspace"), "keys=1,")
	}, ttl/4, 10*time.Millisecond)
	deadline := lk.Deadline()
	primary.Kill()
	awaitInfo(t, replica, "role:master")
	require.Eventually(t, func() bool { return lk.Deadline().After(deadline) }, time.Until(deadline), 10*time.Millisecond, "it is renewed")
	next, err := l.Acquire(t.Context(), "another{lock:n}")
	require.NoError(t, err)
	require.NoError(t, next.Release(t.Context()))
	require.NoError(t, lk.Release(t.Context()))
	require.NoError(t, l.Wait(t.Context()))
}
