package integration

import (
	"context"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

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

// clusterFaults are rows on a cluster of three primaries, each with a replica.
func clusterFaults(t *testing.T) (results []result) {
	rows := []row{{fault: "cluster: slots move (MOVED, ASK)"}, {fault: "cluster: a primary killed, its replica takes over", overlap: true}}
	for _, r := range rows {
		t.Run(r.fault, func(t *testing.T) {
			c := redistest.StartCluster(t, redistest.Redis7, 3)
			config := r.config()
			config.Addr, config.Cluster = c.Servers[0].Addr(), true
			n := &nemesis{world: worldOf(t, config, c.Client(t))}
			switch {
			case r.overlap:
				addReplicas(t, c)
				r.make = func(n *nemesis) {
					primary := serverOf(t, c, "lock:k1")
					if primary == c.Servers[0] {
						primary = serverOf(t, c, "lock:k2") // the workers may still have to ask the first
					}
					primary.Kill()
					sleep(6 * time.Second) // the node timeout is 2 s
				}
			default:
				r.make = func(n *nemesis) {
					for range 3 {
						for _, name := range n.names() {
							moveSlot(t, c, "lock:"+name)
						}
					}
				}
			}
			results = append(results, n.suffer(r))
		})
	}
	return results
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

// addReplicas gives each primary a replica, and waits until it has all data.
func addReplicas(t *testing.T, c *redistest.Cluster) {
	t.Helper()
	primaries := c.Servers
	for _, p := range primaries {
		r := redistest.StartNode(t, redistest.Redis7)
		host, port, _ := net.SplitHostPort(p.Addr())
		ask(t, r, "CLUSTER", "MEET", host, port, p.BusPort())
		id := ask(t, p, "CLUSTER", "MYID")
		require.Eventually(t, func() bool {
			rdb := redis.NewClient(&redis.Options{Addr: r.Addr()})
			defer rdb.Close()
			return rdb.Do(context.Background(), "CLUSTER", "REPLICATE", id).Err() == nil
		}, 20*time.Second, 50*time.Millisecond)
		require.Eventually(t, func() bool { return strings.Contains(ask(t, r, "INFO", "replication"), "master_link_status:up") },
			20*time.Second, 50*time.Millisecond)
	}
	sleep(2 * time.Second) // all nodes have to know
}

// sentinelFault is a failover with the lock on the side that is lost: the primary is stopped, and comes back as a replica.
func sentinelFault(t *testing.T) (results []result) {
	r := row{fault: "Sentinel: failover, the lock on the lost side", overlap: true}
	t.Run(r.fault, func(t *testing.T) {
		s := redistest.StartSentinel(t)
		config := r.config()
		config.Addr, config.Sentinel = s.Sentinel.Addr(), redistest.SentinelName
		n := &nemesis{world: worldOf(t, config, s.Client(t))}
		r.make = func(*nemesis) {
			old := s.Primary(t)
			ask(t, s.Replica(t), "CONFIG", "SET", "repl-timeout", "3600")
			old.Pause()
			s.AwaitFailover(t, old)
			old.Resume()
			sleep(time.Second)
		}
		results = append(results, n.suffer(r))
	})
	return results
}
