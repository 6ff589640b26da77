package lock_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/internal/keys"
	"github.com/seed-b640e7e9/lock/internal/redistest"
)

func TestC23ScriptsAreSentAgainAfterAFlushOnEveryPath(t *testing.T) {
	server := redistest.Start(t, redistest.Redis7)
	rdb := server.Client(t)
	flush := func() { require.NoError(t, rdb.ScriptFlush(t.Context()).Err()) }
	l := lock.New(server.Client(t), lock.WithFencing(), lock.WithTTL(600*time.Millisecond))
	lk := acquire(t, l, "n")
	flush()
	first := lk.Deadline()
	require.Eventually(t, func() bool { return lk.Deadline().After(first) }, 10*time.Second, 10*time.Millisecond, "renewed")
	flush()
	require.NoError(t, lk.Extend(t.Context(), time.Minute))
	flush()
	release(t, lk)
	require.Zero(t, rdb.Exists(t.Context(), "lock:n").Val())
	flush()
	release(t, acquire(t, l.With(lock.WithMinHold(time.Millisecond)), "n"))
}

func TestC23ALockOutlivesARestartThatKeepsItsData(t *testing.T) {
	server := redistest.Start(t, redistest.Redis7, "--appendonly", "yes", "--appendfsync", "always")
	l := lock.New(server.Client(t), lock.WithFencing(), lock.WithTTL(5*time.Second))
	lk := acquire(t, l, "n")
	server.Kill()
	server.Restart(t)
	require.Eventually(t, func() bool { return lk.Extend(t.Context(), time.Minute) == nil }, 10*time.Second, 50*time.Millisecond)
	require.NoError(t, lk.Release(t.Context()))
	next := acquire(t, l, "n")
	require.Greater(t, next.Fence(), lk.Fence())
	release(t, next)
}

// user makes a client of a new user of the server.
func user(t *testing.T, server *redistest.Server, name string, rules ...string) *redis.Client {
	t.Helper()
	args := []any{"ACL", "SETUSER", name, "reset", "on", ">secret"}
	for _, rule := range rules {
		args = append(args, rule)
	}
	require.NoError(t, server.Client(t).Do(t.Context(), args...).Err())
	return server.Client(t, func(o *redis.Options) { o.Username, o.Password = name, "secret" })
}

func TestC24APrefixIsAllThatAUserHasToBeGranted(t *testing.T) {
	server := redistest.Shared(t, redistest.Redis7)
	require.NoError(t, server.Client(t).Do(t.Context(), "ACL", "LOG", "RESET").Err())
	// Exactly what the README says, and what go-redis needs to connect.
	commands := []string{
		"resetchannels", "-@all", "+hello", "+client", "+set", "+get", "+pttl", "+pexpire", "+del", "+evalsha", "+eval", "+incrby",
		"+time", "+spublish", "+ssubscribe", "+sunsubscribe", "+pubsub|shardnumsub", "+ping",
	}
	mine := user(t, server, "app1", append(commands, "~app1:*", "&app1:lock:*")...)
	l := lock.New(mine, lock.WithPrefix("app1:"), lock.WithClockFencing(), lock.WithTTL(time.Second))
	for _, name := range []string{"n", "un}paired", "{tag}:n"} {
		lk := acquire(t, l, name)
		other := acquire(t, lock.New(server.Client(t), lock.WithPrefix("app2:")), name)
		require.NoError(t, lk.Extend(t.Context(), time.Minute))
		require.NoError(t, lk.Fence().Set(t.Context(), mine, "app1:value"+name, "v"))
		release(t, lk)
		release(t, other)
		release(t, acquire(t, l.With(lock.WithMinHold(time.Millisecond)), name))
		waitInLine(t, l, lock.New(server.Client(t), lock.WithPrefix("app1:")), name)
	}
	acl := server.Client(t).Do(t.Context(), "ACL", "LOG").Val()
	require.NotContains(t, fmt.Sprint(acl), "app1", "nothing was denied")

	stray := lock.New(mine, lock.WithPrefix("app3:"))
	for _, l := range []*lock.Locker{stray, stray.With(lock.WithFencing())} {
		start := time.Now()
		_, err := l.Acquire(t.Context(), "n")
		require.ErrorContains(t, err, "NOPERM")
		require.NotErrorIs(t, err, lock.ErrHeld)
		require.Less(t, time.Since(start), 10*time.Second, "waiting does not heal it")
	}
	require.Zero(t, server.Client(t).Exists(t.Context(), "app3:lock:n").Val())
}

// waitInLine makes two callers of l wait for a lock that another process releases, and pass it on.
func waitInLine(t *testing.T, l, another *lock.Locker, name string) {
	t.Helper()
	lk := acquire(t, another, name)
	var wg sync.WaitGroup
	for range 30 {
		wg.Go(func() { release(t, acquire(t, l, name)) })
	}
	require.Eventually(t, func() bool { return lock.Waiting(l, name) == 29 }, 30*time.Second, time.Millisecond)
	release(t, lk)
	wg.Wait()
}

func TestC24ADenialInsideAScriptLeavesNoLock(t *testing.T) {
	server := redistest.Shared(t, redistest.Redis7)
	noIncr := user(t, server, "noincr", "resetchannels", "-@all", "+hello", "+client", "+set", "+get", "+pttl", "+pexpire", "+del", "+evalsha", "+eval", "~*")
	_, err := lock.New(noIncr, lock.WithFencing()).Acquire(t.Context(), "denied")
	require.Error(t, err)
	require.NotErrorIs(t, err, lock.ErrUnknown)
	require.Zero(t, server.Client(t).Exists(t.Context(), "lock:denied").Val())

	noDel := user(t, server, "nodel", "resetchannels", "-@all", "+hello", "+client", "+set", "+get", "+pttl", "+pexpire", "+evalsha", "+eval", "~*")
	lk := acquire(t, lock.New(noDel, lock.WithTTL(time.Second)), "nodel")
	err = lk.Release(t.Context())
	require.Error(t, err)
	require.NotErrorIs(t, err, lock.ErrLost)
	require.NotErrorIs(t, err, lock.ErrUnknown, "it certainly was not done")
}

// The scripts' text is in scripts.go and fence.go as raw strings; every key that they touch has to come from KEYS.
func TestC25NoScriptBuildsAKey(t *testing.T) {
	called := regexp.MustCompile(`redis\.p?call\('([A-Z]+)'(?:, ([^,)]+))?`)
	n := 0
	for _, file := range []string{"scripts.go", "fence.go"} {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, call := range called.FindAllStringSubmatch(string(text), -1) {
			n++
			if call[1] == "TIME" || call[1] == "PUBSUB" { // whose key is its third word
				continue
			}
			require.Contains(t, []string{"KEYS[1]", "KEYS[2]"}, call[2], call[0])
		}
	}
	require.Greater(t, n, 15)
}

func TestC26BothKeysOfEveryNameAreInOneSlot(t *testing.T) {
	cluster := redistest.StartCluster(t, redistest.Redis7, 3)
	node := redis.NewClient(&redis.Options{Addr: cluster.Addrs()[0]})
	defer node.Close()
	var all []string
	for range 2000 {
		all = append(all, randomName())
	}
	pipe := node.Pipeline()
	var slots []*redis.IntCmd
	for i, name := range all {
		prefix := []string{"", "p:", "{t}:", "}"}[i%4]
		for _, key := range []string{keys.Lock(prefix, name), keys.Fence(prefix, name), name, keys.Mark(name)} {
			slots = append(slots, pipe.ClusterKeySlot(t.Context(), key))
		}
	}
	_, err := pipe.Exec(t.Context())
	require.NoError(t, err)
	for i := 0; i < len(slots); i += 2 {
		require.Equal(t, slots[i].Val(), slots[i+1].Val(), "%q", slots[i].Args())
		require.EqualValues(t, slots[i].Val(), keys.Slot(slots[i].Args()[2].(string)))
	}
	l := lock.New(cluster.Client(t), lock.WithClockFencing())
	names := append(all[:100:100], "}", "}x", "{", "{}", "a}b{c", "{u1}:cart", "{{x}}")
	for _, name := range names {
		lk := acquire(t, l, name)
		require.Positive(t, lk.Fence())
		require.NoError(t, lk.Extend(t.Context(), time.Minute))
		release(t, lk)
	}
}

// randomName is short, and full of what could confuse a hash tag.
func randomName() string {
	parts := []string{"{", "}", "a", "lock:", "fence:", ":", "é", "\x00", "{}", "}{", "0", "xyz"}
	var b strings.Builder
	for range 1 + rand.N(6) {
		b.WriteString(parts[rand.N(len(parts))])
	}
	return b.String()
}

// replica starts a server that follows the primary.
func replica(t *testing.T, primary *redistest.Server) *redistest.Server {
	t.Helper()
	host, port, err := net.SplitHostPort(primary.Addr())
	require.NoError(t, err)
	r := redistest.Start(t, redistest.Redis7, "--replicaof", host+" "+port)
	rdb := r.Client(t)
	require.Eventually(t, func() bool {
		return strings.Contains(rdb.Info(t.Context(), "replication").Val(), "master_link_status:up")
	}, 30*time.Second, 20*time.Millisecond)
	return r
}

func TestC28WhatAReplicaSaysIsNoLoss(t *testing.T) {
	primary := redistest.Start(t, redistest.Redis7)
	follower := replica(t, primary)
	ctx := t.Context()
	direct := primary.Client(t)
	require.NoError(t, direct.Set(ctx, "lock:another", "another", time.Hour).Err())
	awaitReplica(t, follower, "lock:another")

	behind := lock.NewStore(follower.Client(t))
	for _, name := range []string{"another", "missing"} {
		r := lock.Request{Key: lock.Key{Lock: "lock:" + name}, Token: "mine", TTL: time.Minute}
		readOnly := func(err error) {
			t.Helper()
			require.ErrorContains(t, err, "READONLY", name)
			require.NotErrorIs(t, err, lock.ErrLost, name)
			require.NotErrorIs(t, err, lock.ErrHeld, name)
		}
		for _, hold := range []time.Duration{0, time.Minute} {
			r.Hold = hold
			_, err := behind.Release(ctx, r)
			readOnly(err)
		}
		for _, r.Count = range []int{0, 1} {
			behind.Renew(ctx, []lock.Request{r}, func(_ int, _ lock.Reply, err error) { readOnly(err) })
		}
		for _, r.Again = range []bool{false, true} {
			_, err := behind.Acquire(ctx, r)
			readOnly(err)
		}
	}
	require.Equal(t, "another", direct.Get(ctx, "lock:another").Val(), "the probe changed nothing")
	require.Greater(t, direct.PTTL(ctx, "lock:another").Val(), 50*time.Minute)

	ahead := lock.NewStore(direct)
	for _, name := range []string{"another", "missing"} {
		r := lock.Request{Key: lock.Key{Lock: "lock:" + name}, Token: "mine", TTL: time.Minute}
		_, err := ahead.Release(ctx, r)
		require.ErrorIs(t, err, lock.ErrLost, name)
		for _, r.Count = range []int{0, 1} {
			ahead.Renew(ctx, []lock.Request{r}, func(_ int, _ lock.Reply, err error) {
				require.ErrorIs(t, err, lock.ErrLost, name)
			})
		}
	}
	require.Equal(t, "another", direct.Get(ctx, "lock:another").Val())
	require.Greater(t, direct.PTTL(ctx, "lock:another").Val(), 50*time.Minute)
}

func awaitReplica(t *testing.T, follower *redistest.Server, key string) {
	t.Helper()
	rdb := follower.Client(t)
	require.Eventually(t, func() bool { return rdb.Exists(t.Context(), key).Val() == 1 }, 30*time.Second, 10*time.Millisecond)
}

func TestC28AClusterClientThatPrefersReplicasStillAsksThePrimary(t *testing.T) {
	cluster := redistest.StartCluster(t, redistest.Redis7, 3)
	rdb := cluster.Client(t, func(o *redis.ClusterOptions) { o.ReadOnly, o.RouteRandomly = true, true })
	l := lock.New(rdb, lock.WithFencing())
	for i := range 20 {
		lk := acquire(t, l, fmt.Sprint(i))
		require.NoError(t, lk.Extend(t.Context(), time.Minute))
		require.True(t, lk.Valid())
		release(t, lk)
		require.False(t, lk.Valid())
	}
}

func TestC27ALockThatTheNewPrimaryNeverHeardOfIsLostSoon(t *testing.T) {
	primary := redistest.Start(t, redistest.Redis7)
	follower := redistest.Start(t, redistest.Redis7) // the link is cut: it knows nothing
	var current atomic.Pointer[redistest.Server]
	current.Store(primary)
	proxy := redistest.NewProxy(t, func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", current.Load().Addr())
	})
	const ttl = 3 * time.Second
	l := lock.New(proxy.Client(t), lock.WithTTL(ttl), lock.WithFencing())
	lk := acquire(t, l, "n")
	proxy.RefuseAll()
	current.Store(follower) // the failover
	proxy.Heal()
	other := acquire(t, lock.New(follower.Client(t), lock.WithFencing()), "n")
	start := time.Now()
	<-lk.Context().Done()
	require.ErrorIs(t, context.Cause(lk.Context()), lock.ErrLost)
	require.Less(t, time.Since(start), ttl, "noticed at the next renewal")
	require.ErrorIs(t, lk.Release(t.Context()), lock.ErrLost)
	require.True(t, other.Valid(), "and the other is left alone")
	require.NoError(t, other.Extend(t.Context(), time.Minute))
	require.LessOrEqual(t, other.Fence(), lk.Fence(), "the counter has gone back with the data: documented")
	release(t, other)
}

func TestOutOfMemoryRefusesALockAndKeepsAHeldOne(t *testing.T) {
	server := redistest.Start(t, redistest.Redis7)
	rdb := server.Client(t)
	l := lock.New(server.Client(t), lock.WithFencing(), lock.WithTTL(time.Second))
	held, kept := acquire(t, l, "held"), acquire(t, l.With(lock.WithMinHold(time.Minute)), "kept")
	require.NoError(t, rdb.ConfigSet(t.Context(), "maxmemory", "1").Err())
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err := l.Acquire(ctx, "new")
	require.ErrorContains(t, err, "OOM")
	require.NotErrorIs(t, err, lock.ErrHeld)
	require.NoError(t, held.Extend(t.Context(), time.Minute))
	release(t, held)
	release(t, kept)
	require.Zero(t, rdb.Exists(t.Context(), "lock:new", "lock:held").Val())
	require.Greater(t, rdb.PTTL(t.Context(), "lock:kept").Val(), 50*time.Second, "MinHold keeps its promise")
}

func TestAKeyOfAnotherTypeIsAPermanentError(t *testing.T) {
	onServers(t, func(t *testing.T, rdb redis.UniversalClient) {
		require.NoError(t, rdb.LPush(t.Context(), "lock:list", "x").Err())
		for _, opts := range [][]lock.Option{nil, {lock.WithFencing()}} {
			l := lock.New(rdb, opts...)
			_, err := l.Acquire(t.Context(), "list")
			require.ErrorContains(t, err, "WRONGTYPE")
			require.NotErrorIs(t, err, lock.ErrUnknown)
		}
	})
}

func TestStoresSayWhatTimeCantHeal(t *testing.T) {
	require.NoError(t, lock.Permanent(nil))
	err := lock.Permanent(os.ErrNotExist)
	require.ErrorIs(t, err, os.ErrNotExist)
	l := lock.NewWithStore(&failing{err: err})
	_, got := l.Acquire(t.Context(), "n") // returns although its context never ends
	require.ErrorIs(t, got, os.ErrNotExist)
	require.Panics(t, func() { lock.NewWithStore(uncomparable{}) })
}

// failing is a Store that always fails.
type failing struct{ err error }

func (f *failing) Acquire(context.Context, lock.Request) (lock.Reply, error) {
	return lock.Reply{}, f.err
}

func (f *failing) Release(context.Context, lock.Request) (lock.Reply, error) {
	return lock.Reply{}, f.err
}

func (f *failing) Renew(_ context.Context, rs []lock.Request, done func(int, lock.Reply, error)) {
	for i := range rs {
		done(i, lock.Reply{}, f.err)
	}
}

func (f *failing) Listen(context.Context, lock.Key, func(string)) (func(), error) { return nil, f.err }
func (f *failing) Wait(context.Context) error                                     { return nil }

type uncomparable struct {
	lock.Store
	_ []int
}

func TestALeaseThatIsAlmostOverIsKnownToBe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.Mini(t)
		require.NoError(t, m.Set("lock:n", "another"))
		m.SetTTL("lock:n", 10*time.Millisecond)
		time.Sleep(10*time.Millisecond - 100*time.Microsecond)
		r := lock.Request{Key: lock.Key{Lock: "lock:n"}, Token: "mine", TTL: time.Minute, Again: true}
		reply, err := lock.NewStore(redistest.MiniClient(t, m)).Acquire(t.Context(), r)
		require.ErrorIs(t, err, lock.ErrHeld)
		require.Equal(t, time.Millisecond, reply.Remaining)
	})
}
