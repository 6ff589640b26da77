package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"syscall"

	"github.com/seed-b640e7e9/lock"
)

// quorum compares Redlock with redsync over the same nodes: with all of them up, with one stopped, and under contention.
// The nodes are always started here.
func quorum(ctx context.Context, c config) error {
	fmt.Printf("## redlock: a quorum of 3 and of 5 nodes, %d pairs of rounds of %d\n\n", c.pairs, c.ops)
	fmt.Println("| nodes | | time / redsync, median (95 % interval) | time | allocations, of redsync |")
	fmt.Println("|---|---|---|---|---|")
	var rows []func() error
	for _, n := range []int{3, 5} {
		servers, addr, stop, err := startServers(ctx, n)
		if err != nil {
			return err
		}
		defer stop()
		if err := quorumPairs(ctx, c, servers, addr); err != nil {
			return err
		}
		rows = append(rows, func() error { return quorumProcesses(ctx, c, n, addr) })
	}
	fmt.Printf("\nEight processes of one goroutine:\n\n"+tallyHead, "nodes")
	for _, row := range rows {
		if err := row(); err != nil {
			return err
		}
	}
	fmt.Println()
	return nil
}

func startServers(ctx context.Context, n int) (servers []*local, addr string, stop func(), err error) {
	stop = func() {
		for _, s := range servers {
			s.stop()
		}
	}
	var addrs []string
	for range n {
		s, err := startServer(ctx)
		if err != nil {
			stop()
			return nil, "", nil, err
		}
		a, err := address(s.url)
		if err != nil {
			return nil, "", nil, err
		}
		servers, addrs = append(servers, s), append(addrs, a)
	}
	return servers, strings.Join(addrs, ","), stop, nil
}

func quorumPairs(ctx context.Context, c config, servers []*local, addr string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	theirs, err := openRedsync(addr, newKey(), nil)
	if err != nil {
		return err
	}
	defer theirs.close()
	clients, closeAll := nodes(addr, nil)
	defer closeAll()
	l := newLocker(clients)
	redsync := contestant{"redsync", func() error {
		unlock, err := theirs.lock(ctx)
		if err != nil {
			return err
		}
		return unlock()
	}}
	ours := contestant{"Acquire, Release", lockPair(ctx, l)}
	for _, a := range []contestant{redsync, ours, {"the same, WithFencing", lockPair(ctx, l.With(lock.WithFencing()))}} {
		r, err := compare(ctx, c, a, redsync)
		if err != nil {
			return err
		}
		fmt.Printf("| %d | %s | %.3f (%.3f - %.3f) | %v | %.1f, %.1f |\n", len(servers), a.name,
			r.ratio.Center, r.ratio.Lo, r.ratio.Hi, r.time, r.allocs, r.allocsOf)
	}
	return oneStopped(ctx, c, servers, ours)
}

// oneStopped compares the work with one node stopped and with all of them up. A node is stopped and started between
// rounds.
func oneStopped(ctx context.Context, c config, servers []*local, a contestant) error {
	var ratios []float64
	for i := range max(c.pairs/10, 10) {
		up, err := round(ctx, c.ops, a.op)
		if err != nil {
			return err
		}
		victim := servers[i%len(servers)].cmd.Process
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
		if _, err := round(ctx, c.ops, a.op); err != nil { // the node catches up
			return err
		}
		ratios = append(ratios, float64(down)/float64(up))
	}
	r := median(ratios)
	fmt.Printf("| %d | %s with one node stopped, against all up | %.3f (%.3f - %.3f) | | |\n", len(servers), a.name, r.Center, r.Lo, r.Hi)
	return nil
}

func quorumProcesses(ctx context.Context, c config, n int, addr string) error {
	for _, p := range []string{"lock", "lock, fencing", "redsync"} {
		fmt.Fprintf(os.Stderr, "\r\033[K%d nodes: %s ", n, p)
		text, err := json.Marshal(job{p, addr, newKey(), 1, c.each})
		if err != nil {
			return err
		}
		t, err := children(ctx, 8, string(text))
		if err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
		fmt.Fprint(os.Stderr, "\r\033[K")
		t.row(fmt.Sprint(n), p)
	}
	return nil
}
