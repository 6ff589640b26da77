package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/bench/internal/report"
)

// quorum compares Redlock with redsync over the same nodes: with all of them up, with one stopped, and under contention.
// The nodes are always started here.
func quorum(ctx context.Context, c config) (report.Section, error) {
	c.pairs = max(c.pairs/5, 10)
	s := report.Section{
		Title: "Redlock: a quorum of 3 and of 5 nodes",
		Text:  fmt.Sprintf("Beside redsync over the same nodes, %d pairs of rounds of %d, as without contention above.", c.pairs, c.ops),
	}
	pairs := report.Table{Head: []string{"nodes", "", "time, of redsync", "CPU time, of redsync", "time", "allocations, of redsync"}}
	stopped := report.Table{
		Text: "The same work with one node stopped, against all of them up:",
		Head: []string{"nodes", "", "time, of that with all up", "time"},
	}
	busy := report.Table{Text: fmt.Sprintf("%d processes of one goroutine want one lock:", slices.Max(c.procs)), Head: tallyHead("nodes")}
	for _, n := range []int{3, 5} {
		servers, urls, stop, err := startServers(ctx, n)
		if err != nil {
			return s, err
		}
		defer stop()
		if err := quorumPairs(ctx, c, servers, urls, &pairs, &stopped); err != nil {
			return s, err
		}
		if err := quorumProcesses(ctx, c, n, urls, &busy); err != nil {
			return s, err
		}
	}
	s.Tables = []report.Table{pairs, stopped, busy}
	return s, nil
}

func startServers(ctx context.Context, n int, args ...string) (servers []*local, urls string, stop func(), err error) {
	stop = func() {
		for _, s := range servers {
			s.stop()
		}
	}
	var all []string
	for range n {
		s, err := startServer(ctx, args...)
		if err != nil {
			stop()
			return nil, "", nil, err
		}
		servers, all = append(servers, s), append(all, s.url)
	}
	return servers, strings.Join(all, ","), stop, nil
}

func quorumPairs(ctx context.Context, c config, servers []*local, urls string, pairs, stopped *report.Table) error {
	theirs, err := openRedsync(urls, nil)
	if err != nil {
		return err
	}
	defer theirs.close()
	clients, closeAll, err := nodes(urls, nil)
	if err != nil {
		return err
	}
	defer closeAll()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	l, name := newLocker(clients), newName()
	redsync := contestant{byRedsync, func() error { return theirs.once(ctx, name) }}
	plain := contestant{us, lockPair(ctx, l, name)}
	fenced := contestant{usFenced, lockPair(ctx, l.With(lock.WithFencing()), name)}
	ofTheirs, err := allocs(c.allocOps(), redsync.op)
	if err != nil {
		return err
	}
	for _, a := range []contestant{redsync, plain, fenced} {
		r, err := compare(ctx, c.pairs, c.ops, a, redsync)
		if err != nil {
			return err
		}
		heap, err := allocs(c.allocOps(), a.op)
		if err != nil {
			return err
		}
		pairs.Add(fmt.Sprint(len(servers)), a.name, interval(r.time, 3), interval(r.cpu, 2), brief(r.each),
			fmt.Sprintf("%.1f, of %.1f", heap.count, ofTheirs.count))
	}
	return oneStopped(ctx, c, servers, plain, stopped)
}

// oneStopped compares the work with one node stopped and with all of them up. A node is stopped and started between
// rounds.
func oneStopped(ctx context.Context, c config, servers []*local, a contestant, t *report.Table) error {
	var downs, ups []float64
	for i := range max(c.pairs/5, 10) {
		progress("%d nodes, one stopped: %s, round %d", len(servers), a.name, i)
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
		downs, ups = append(downs, down.time/float64(c.ops)), append(ups, up.time/float64(c.ops))
	}
	t.Add(fmt.Sprint(len(servers)), a.name, interval(ratios(downs, ups), 2), brief(time.Duration(median(downs).Center)))
	return nil
}

func quorumProcesses(ctx context.Context, c config, n int, urls string, t *report.Table) error {
	for _, p := range []string{us, usFenced, byRedsync} {
		progress("%d nodes, %d processes: %s", n, slices.Max(c.procs), p)
		k := contention{Name: newName(), Goroutines: 1, Each: c.each}
		tally, err := children(ctx, slices.Max(c.procs), contendJob{p, urls, k})
		if err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
		t.Rows = append(t.Rows, tally.row(n, p))
	}
	return nil
}
