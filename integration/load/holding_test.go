package load_test

import (
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/internal/redistest"
)

const hands = 16 // goroutines that take and release what is held

// holding is what is held, for how long, and what happens meanwhile.
type holding struct {
	locks   int
	ttl     time.Duration
	stay    time.Duration
	freeze  time.Duration // of the server, in the middle
	latency time.Duration // of a round trip, beside its own
}

func TestManyLocksAreHeldAndNoneIsLost(t *testing.T) {
	hold(t, holding{size(5_000, 100_000), size(3*time.Second, 30*time.Second), size(7*time.Second, 3*time.Minute), 0, 0})
}

func TestManyLocksAreHeldThroughAFreezeOfTheServer(t *testing.T) {
	hold(t, holding{
		size(5_000, 100_000), size(3*time.Second, 30*time.Second), size(7*time.Second, 3*time.Minute), size(500*time.Millisecond, 2*time.Second), 0,
	})
}

// A slow network has room for few commands at a time, so renewals have to go together. Locks that were taken at once are
// renewed at once in the beginning, and only in the course of time at any time.
func TestManyLocksAreHeldOverASlowNetwork(t *testing.T) {
	hold(t, holding{size(3_000, 10_000), size(3*time.Second, 10*time.Second), size(9*time.Second, 45*time.Second), 0, 150 * time.Millisecond})
}

// hold keeps many locks for a while and tells what that costs.
func hold(t *testing.T, h holding) {
	server := redistest.Start(t, redistest.Redis7)
	admin, rdb := server.Client(t), server.Client(t, obedient)
	slow := func(time.Duration) {}
	if h.latency > 0 {
		p := redistest.ProxyTo(t, server.Addr())
		rdb, slow = p.Client(t, obedient), p.Latency
	}
	l := lock.New(rdb, lock.WithTTL(h.ttl), lock.WithLogger(slog.New(slog.DiscardHandler)))
	warm, err := l.Acquire(t.Context(), "warm")
	require.NoError(t, err)
	require.NoError(t, warm.Release(t.Context()))

	before := heap()
	held := make([]*lock.Lock, h.locks)
	require.Zero(t, each(held, func(i int, _ *lock.Lock) (err error) {
		held[i], err = l.Acquire(t.Context(), fmt.Sprintf("holding:%d", i))
		return err
	}))
	bytes := (heap() - before) / h.locks
	slow(h.latency)

	cpu, remote, renewals, began := clientCPU(), serverCPU(t, admin), scriptCalls(t, admin), time.Now()
	calm := watch(h.stay / 2)
	if h.freeze > 0 {
		server.Pause()
		time.Sleep(h.freeze) // the length of the fault, not a wait for anything
		server.Resume()
	}
	late := watch(h.stay / 2)
	took := time.Since(began)
	cpu, remote, renewals = clientCPU()-cpu, serverCPU(t, admin)-remote, scriptCalls(t, admin)-renewals

	lost := 0
	for _, lk := range held {
		if !lk.Valid() {
			lost++
		}
	}
	slow(0)
	unreleased := each(held, func(_ int, lk *lock.Lock) error { return lk.Release(t.Context()) })
	t.Logf("%s: %d locks, TTL %v, for %v, server frozen for %v, round trips %v longer: %d lost, %d bytes a lock, goroutines %d to %d before and %d to %d "+
		"after the middle, %.0f renewals/s, client CPU %.1f %%, server CPU %.1f %% of a core", about(t, admin), h.locks, h.ttl,
		took.Round(time.Second), h.freeze, h.latency, lost, bytes, calm.least, calm.most, late.least, late.most,
		renewals/took.Seconds(), 100*cpu.Seconds()/took.Seconds(), 100*remote.Seconds()/took.Seconds())
	require.Zero(t, lost)
	require.Zero(t, unreleased)
	require.Positive(t, renewals)
	// Renewals under way have goroutines, the locks have none; nor do they pile up. A connection through a proxy has five.
	require.Less(t, min(calm.least, late.least), 250)
	require.Less(t, max(calm.most, late.most), h.locks)
	require.NoError(t, l.Wait(within(t, time.Minute)))
	require.Empty(t, lockKeys(t, admin))
}

// each calls f for each lock, some at a time, and returns how often it failed.
func each(locks []*lock.Lock, f func(int, *lock.Lock) error) int64 {
	var failed, next atomic.Int64
	var wg sync.WaitGroup
	for range hands {
		wg.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(locks)); i = next.Add(1) - 1 {
				if f(int(i), locks[i]) != nil {
					failed.Add(1)
				}
			}
		})
	}
	wg.Wait()
	return failed.Load()
}

// goroutines are counts, by samples.
type goroutines struct{ least, most, last int }

// watch counts goroutines for a while.
func watch(d time.Duration) goroutines {
	g := goroutines{least: runtime.NumGoroutine()}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(d); time.Now().Before(end); <-tick.C {
		g.last = runtime.NumGoroutine()
		g.least, g.most = min(g.least, g.last), max(g.most, g.last)
	}
	return g
}

// scriptCalls is how many scripts the server has run: while locks are only held, these are renewals.
func scriptCalls(t *testing.T, rdb *redis.Client) float64 {
	t.Helper()
	return mustInfo(t, rdb, "commandstats", "cmdstat_evalsha:calls=")
}
