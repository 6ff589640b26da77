package lock_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/internal/keys"
	"github.com/seed-b640e7e9/lock/internal/redistest"
)

// sleeper is a waiter in real time, which returns once its subscription is confirmed by one of the servers.
func sleeper(t *testing.T, l *lock.Locker, name string, servers ...*redistest.Server) *waiter {
	t.Helper()
	w := &waiter{result: make(chan *lock.Lock, 1)}
	w.ctx, w.cancel = context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(w.cancel)
	go func() {
		var lk *lock.Lock
		lk, w.err = l.Acquire(w.ctx, name)
		w.result <- lk
	}()
	awaitListener(t, name, servers...)
	return w
}

func awaitListener(t *testing.T, name string, servers ...*redistest.Server) {
	t.Helper()
	require.Eventually(t, func() bool {
		for _, s := range servers {
			c := redis.NewClient(&redis.Options{Addr: s.Addr()})
			n := c.PubSubShardNumSub(t.Context(), "lock:"+name).Val()["lock:"+name]
			_ = c.Close()
			if n > 0 {
				return true
			}
		}
		return false
	}, 30*time.Second, 5*time.Millisecond, "nobody listens to %s", name)
}

// rounds hands a lock to and fro, and fails if waking takes as long as asking would.
func rounds(t *testing.T, n int, name string, a, b *lock.Locker, servers ...*redistest.Server) {
	t.Helper()
	var waited time.Duration
	held := acquire(t, a, name)
	for i := range n {
		next := []*lock.Locker{b, a}[i%2]
		w := sleeper(t, next, name, servers...)
		start := time.Now()
		release(t, held)
		held = w.lock(t)
		waited += time.Since(start)
	}
	release(t, held)
	require.Less(t, waited, time.Duration(n)*400*time.Millisecond, "the fallback is at three quarters of a second at least")
}

func TestWakeUpsOnServers(t *testing.T) {
	for _, kind := range redistest.Kinds() {
		server := redistest.Shared(t, kind)
		for _, protocol := range []int{2, 3} {
			opt := func(o *redis.Options) { o.Protocol = protocol }
			rounds(t, 10, fmt.Sprint("woken", protocol), lock.New(server.Client(t, opt)), lock.New(server.Client(t, opt), lock.WithFencing()), server)
		}
	}
}

func TestWakeUpsOnAClusterReachBothTypesOfClients(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, redistest.Redis7, 3)
	for i := range 6 {
		name := fmt.Sprint("n", i)
		home := owner(t, cluster, name)
		plain := home.Client(t)
		clusterwide := lock.New(cluster.Client(t))
		rounds(t, 6, name, clusterwide, lock.New(plain), home)
		settle(t, clusterwide)
	}
}

// owner returns the node that has a lock's slot.
func owner(t *testing.T, cluster *redistest.Cluster, name string) *redistest.Server {
	t.Helper()
	slot := keys.Slot("lock:" + name)
	shards, err := cluster.Servers[0].Client(t).ClusterShards(t.Context()).Result()
	require.NoError(t, err)
	for _, shard := range shards {
		for _, r := range shard.Slots {
			if int(r.Start) > slot || slot > int(r.End) {
				continue
			}
			for _, s := range cluster.Servers {
				if strings.HasSuffix(s.Addr(), fmt.Sprint(":", shard.Nodes[0].Port)) {
					return s
				}
			}
		}
	}
	t.Fatal("no owner of the slot")
	return nil
}

func TestSubscriptionsAreRenewedWhenTheyAreKilled(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, redistest.Redis7, 3)
	there, here := lock.New(cluster.Client(t)), lock.New(cluster.Client(t))
	for range 3 {
		var held []*lock.Lock
		var waiters []*waiter
		var names []string
		for i := range 12 { // several slots of each node
			names = append(names, fmt.Sprint("killed", i))
			held = append(held, acquire(t, there, names[i]))
			waiters = append(waiters, sleeper(t, here, names[i], cluster.Servers...))
		}
		for _, s := range cluster.Servers {
			require.NoError(t, s.Client(t).Do(t.Context(), "CLIENT", "KILL", "TYPE", "pubsub").Err())
		}
		for i, name := range names {
			awaitListener(t, name, owner(t, cluster, name))
			release(t, held[i])
			release(t, waiters[i].lock(t))
		}
		settle(t, here)
	}
}

func TestAWaiterFollowsASlotThatMoves(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, redistest.Redis7, 3)
	there, here := lock.New(cluster.Client(t)), lock.New(cluster.Client(t))
	lk := acquire(t, there, "moving")
	from := owner(t, cluster, "moving")
	w := sleeper(t, here, "moving", from)
	to := cluster.Servers[(slices.Index(cluster.Servers, from)+1)%3]
	move(t, cluster, "lock:moving", from, to)
	awaitListener(t, "moving", to)
	start := time.Now()
	release(t, lk)
	release(t, w.lock(t))
	require.Less(t, time.Since(start), 20*time.Second)
}

// move moves a key and its slot.
func move(t *testing.T, cluster *redistest.Cluster, key string, from, to *redistest.Server) {
	t.Helper()
	ctx, slot := t.Context(), keys.Slot(key)
	id := func(s *redistest.Server) string { return s.Client(t).ClusterMyID(ctx).Val() }
	do := func(s *redistest.Server, args ...any) {
		require.NoError(t, s.Client(t).Do(ctx, args...).Err(), "%v", args)
	}
	do(to, "CLUSTER", "SETSLOT", slot, "IMPORTING", id(from))
	do(from, "CLUSTER", "SETSLOT", slot, "MIGRATING", id(to))
	host, port, _ := strings.Cut(to.Addr(), ":")
	do(from, "MIGRATE", host, port, key, 0, 5000)
	for _, s := range append([]*redistest.Server{to, from}, cluster.Servers...) {
		do(s, "CLUSTER", "SETSLOT", slot, "NODE", id(to))
	}
}

func TestAWaiterOutlivesARestartOfTheServer(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, redistest.Redis7, "--appendonly", "yes", "--appendfsync", "always")
	there, here := lock.New(server.Client(t), lock.WithTTL(30*time.Second)), lock.New(server.Client(t))
	lk := acquire(t, there, "n")
	w := sleeper(t, here, "n", server)
	server.Restart(t)
	awaitListener(t, "n", server)
	require.NoError(t, lk.Extend(within(t), time.Minute))
	release(t, lk)
	release(t, w.lock(t))
}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// Without the right to subscribe or to publish a lock works: waiters ask, and the log says so once.
func TestWaitersAskWhereTheServerForbidsToTell(t *testing.T) {
	server := redistest.Start(t, redistest.Redis7)
	mute := user(t, server, "mute", "resetchannels", "+@all", "~*")
	var log bytes.Buffer
	l := lock.New(mute, lock.WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
	listening := lock.New(server.Client(t)) // may publish, but is not heard
	for range 5 {
		lk := acquire(t, l, "n")
		next := make(chan *lock.Lock)
		go func() { next <- acquire(t, listening, "n") }()
		awaitListener(t, "n", server)
		require.NoError(t, lk.Release(t.Context()))
		lk = <-next
		go func() { next <- acquire(t, l, "n") }()
		time.AfterFunc(50*time.Millisecond, func() { _ = lk.Release(context.Background()) })
		release(t, <-next)
	}
	settle(t, l)
	settle(t, listening)
	require.Equal(t, 1, strings.Count(log.String(), "waiters are not woken"), log.String())
	require.Equal(t, 1, strings.Count(log.String(), "waiters are not told"), log.String())
	denied := 0
	for _, entry := range server.Client(t).ACLLog(t.Context(), 100).Val() {
		denied += int(entry.Count)
	}
	require.LessOrEqual(t, denied, 2, "each is tried once")
}

// The bound that the documentation gives for one foreign waiter that listens, against a process that locks again at once.
const foreignBound = 8

func TestAForeignWaiterGetsInWithinTheBoundOnAServer(t *testing.T) {
	server := redistest.Start(t, redistest.Redis7)
	hog, foreign := lock.New(server.Client(t)), lock.New(server.Client(t))
	admin := server.Client(t)
	counts := make([]int, foreignBound+2)
	times := 1000
	if redistest.Race {
		times = 200
	}
	listeners := func(n int64) {
		for admin.PubSubShardNumSub(t.Context(), "lock:n").Val()["lock:n"] != n {
			require.NoError(t, t.Context().Err())
		}
	}
	for range times {
		lk := acquire(t, hog, "n")
		listeners(0)
		w := &waiter{result: make(chan *lock.Lock, 1)}
		go func() {
			var lk *lock.Lock
			lk, w.err = foreign.Acquire(context.Background(), "n")
			w.result <- lk
		}()
		listeners(1)
		n, theirs := 0, (*lock.Lock)(nil)
		for theirs == nil {
			release(t, lk)
			n++
			again := make(chan *lock.Lock, 1)
			go func() { again <- acquire(t, hog, "n") }()
			select {
			case theirs = <-w.result:
				require.NoError(t, w.err)
				release(t, theirs)
				lk = <-again
			case lk = <-again:
			}
		}
		release(t, lk)
		counts[min(n, len(counts)-1)]++
	}
	t.Log("releases until the foreign waiter got in, and how often:", counts)
	require.Zero(t, counts[foreignBound+1])
}

// A contender is a child process in which several goroutines take a lock in turn, and count under it without INCR.
const (
	contenderAddr = "LOCK_TEST_CONTENDER_ADDR"
	contenderFor  = 2 * time.Second
)

// TestContenderProcess is the child's main. It prints how many sections each of its goroutines has had.
func TestContenderProcess(t *testing.T) {
	addr := os.Getenv(contenderAddr)
	if addr == "" {
		return // not the child
	}
	rdb := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true})
	defer rdb.Close()
	l := lock.New(rdb, lock.WithFencing())
	ctx, cancel := context.WithTimeout(context.Background(), contenderFor)
	defer cancel()
	var wg sync.WaitGroup
	counts := make([]int, 4)
	for i := range counts {
		wg.Go(func() {
			for ctx.Err() == nil {
				err := l.Do(ctx, "n", func(context.Context) error {
					if rdb.Incr(context.Background(), "inside").Val() != 1 {
						fmt.Println("two are inside")
					}
					defer rdb.Decr(context.Background(), "inside")
					n, _ := rdb.Get(context.Background(), "count").Int()
					return rdb.Set(context.Background(), "count", n+1, 0).Err()
				})
				if err == nil {
					counts[i]++
				}
			}
		})
	}
	wg.Wait()
	require.NoError(t, l.Wait(within(t)))
	fmt.Println("counts", strings.Trim(fmt.Sprint(counts), "[]"))
}

func TestProcessesShareALockFairly(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, redistest.Redis7)
	var children []*exec.Cmd
	var outputs []*bytes.Buffer
	for range 3 {
		cmd := exec.Command(os.Args[0], "-test.run=^TestContenderProcess$", "-test.timeout=2m", "-test.v")
		cmd.Env = append(os.Environ(), contenderAddr+"="+server.Addr())
		out := new(bytes.Buffer)
		cmd.Stdout, cmd.Stderr = out, out
		require.NoError(t, cmd.Start())
		children, outputs = append(children, cmd), append(outputs, out)
	}
	sum := 0
	for i, cmd := range children {
		require.NoError(t, cmd.Wait(), outputs[i].String())
		require.NotContains(t, outputs[i].String(), "two are inside")
		_, line, ok := strings.Cut(outputs[i].String(), "counts ")
		require.True(t, ok, outputs[i].String())
		counts := make([]int, 4)
		_, err := fmt.Sscan(line, &counts[0], &counts[1], &counts[2], &counts[3])
		require.NoError(t, err)
		t.Log("sections of a process, by goroutine:", counts)
		for _, n := range counts {
			require.Positive(t, n, "everybody gets in")
			sum += n
		}
	}
	total, err := server.Client(t).Get(t.Context(), "count").Int()
	require.NoError(t, err)
	require.GreaterOrEqual(t, total, sum)
	require.LessOrEqual(t, total, sum+12, "at most one a goroutine was cut off by the end")
}
