package main

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/go-redsync/redsync/v4"
	redsyncredis "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/redlock"
)

// quorum compares Redlock with redsync over the same nodes: with all of them up, with one stopped, and under contention.
// The nodes are always started here.
func quorum(ctx context.Context, c config) error {
	fmt.Printf("## redlock: a quorum of 3 and 5 nodes, beside redsync; %d pairs of rounds of %d\n\n", c.pairs, c.ops)
	fmt.Println("| nodes | | time / redsync, median (95 % interval) | time | allocations, of redsync |")
	fmt.Println("|---|---|---|---|---|")
	for _, n := range []int{3, 5} {
		if err := quorumOf(ctx, c, n); err != nil {
			return err
		}
	}
	fmt.Println()
	return nil
}

func quorumOf(ctx context.Context, c config, n int) error {
	nodes, stop, err := startNodes(ctx, n)
	if err != nil {
		return err
	}
	defer stop()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	clients := nodes.clients()
	l := redlock.New(clients)
	redsyncs := contestant{"redsync", redsyncPair(ctx, clients)}
	ours := contestant{"Acquire, Release", lockPair(ctx, l)}
	for _, a := range []contestant{redsyncs, ours, {"the same, WithFencing", lockPair(ctx, l.With(lock.WithFencing()))}} {
		r, err := compare(ctx, c, a, redsyncs)
		if err != nil {
			return err
		}
		fmt.Printf("| %d | %s | %.3f (%.3f - %.3f) | %v | %.1f, %.1f |\n", n, a.name,
			r.ratio.Center, r.ratio.Lo, r.ratio.Hi, r.time.Round(100*time.Nanosecond), r.allocs, r.allocsOf)
	}
	if err := oneStopped(ctx, c, nodes, ours); err != nil {
		return err
	}
	return quorumContended(ctx, c, nodes)
}

// oneStopped compares the same work with one node stopped and with all of them up. Rounds take turns, each stop and
// start outside of them.
func oneStopped(ctx context.Context, c config, nodes nodes, a contestant) error {
	var ratios []float64
	for i := range max(c.pairs/10, 10) {
		up, err := round(ctx, c.ops, a.op)
		if err != nil {
			return err
		}
		victim := nodes[i%len(nodes)].cmd.Process
		if err := victim.Signal(syscall.SIGSTOP); err != nil {
			return err
		}
		down, err := round(ctx, c.ops, a.op)
		if cont := victim.Signal(syscall.SIGCONT); err == nil {
			err = cont
		}
		if err != nil {
			return err
		}
		if _, err := round(ctx, 10, a.op); err != nil { // the node catches up
			return err
		}
		ratios = append(ratios, float64(down)/float64(up))
	}
	r := median(ratios)
	fmt.Printf("| %d | %s, one node stopped, against all up | %.3f (%.3f - %.3f) | | |\n", len(nodes), a.name, r.Center, r.Lo, r.Hi)
	return nil
}

// quorumContended counts the critical sections of eight goroutines, each with clients of its own, as processes have.
func quorumContended(ctx context.Context, c config, nodes nodes) error {
	for _, p := range []struct {
		name string
		open func(clients []redis.UniversalClient) func(context.Context) error
	}{
		{"lock, eight processes", func(clients []redis.UniversalClient) func(context.Context) error {
			l := redlock.New(clients)
			return func(ctx context.Context) error {
				return l.Do(ctx, "contended", func(context.Context) error { return nil })
			}
		}},
		{"redsync, eight processes", func(clients []redis.UniversalClient) func(context.Context) error {
			rs := redsyncOf(clients)
			return func(ctx context.Context) error {
				m := rs.NewMutex("redsync:contended", redsync.WithExpiry(ttl), redsync.WithTries(1<<30))
				if err := m.LockContext(ctx); err != nil {
					return err
				}
				_, err := m.UnlockContext(context.WithoutCancel(ctx))
				return err
			}
		}},
	} {
		ctx, cancel := context.WithTimeout(ctx, c.each)
		var sections atomic.Int64
		var wg sync.WaitGroup
		for range 8 {
			op := p.open(nodes.clients())
			wg.Go(func() {
				for op(ctx) == nil {
					sections.Add(1)
				}
			})
		}
		wg.Wait()
		cancel()
		fmt.Printf("| %d | %s: %.0f sections a second | | | |\n", len(nodes), p.name, float64(sections.Load())/c.each.Seconds())
	}
	return nil
}

func redsyncOf(clients []redis.UniversalClient) *redsync.Redsync {
	pools := make([]redsyncredis.Pool, len(clients))
	for i, c := range clients {
		pools[i] = goredis.NewPool(c)
	}
	return redsync.New(pools...)
}

func redsyncPair(ctx context.Context, clients []redis.UniversalClient) func() error {
	rs := redsyncOf(clients)
	return func() error {
		m := rs.NewMutex("redsync:bench", redsync.WithExpiry(ttl))
		if err := m.LockContext(ctx); err != nil {
			return err
		}
		_, err := m.UnlockContext(ctx)
		return err
	}
}

type nodes []*local

func startNodes(ctx context.Context, n int) (nodes, func(), error) {
	var ns nodes
	stop := func() {
		for _, s := range ns {
			s.stop()
		}
	}
	for range n {
		s, err := startServer(ctx)
		if err != nil {
			stop()
			return nil, nil, err
		}
		ns = append(ns, s)
	}
	return ns, stop, nil
}

func (ns nodes) clients() []redis.UniversalClient {
	clients := make([]redis.UniversalClient, len(ns))
	for i, s := range ns {
		clients[i], _ = client(s.url, true) // the URL has been used before
	}
	return clients
}
