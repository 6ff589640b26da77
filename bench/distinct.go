package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/seed-b640e7e9/lock/bench/internal/report"
)

const (
	crowd      = 64              // goroutines
	crowdLimit = 5 * time.Second // for a round
)

// crowdOps is how many operations each of the crowd does in a round.
func (c config) crowdOps() int { return max(c.ops/3, 1) }

// runner does an operation on a name, from many goroutines.
type runner struct {
	name string
	once func(ctx context.Context, name string) error
}

// distinct compares the throughput of goroutines that don't get into each other's way, but share a client.
func distinct(ctx context.Context, c config) (report.Section, error) {
	s := report.Section{
		Title: fmt.Sprintf("Uncontended: %d goroutines, each on a name of its own", crowd),
		Text: fmt.Sprintf("Throughput in %d rounds, in each of which all take turns in random order, with %d operations a goroutine. "+
			"Ratios are the median of the rounds with its 95 %% interval; rounds in which one stalls are left out. All but rueidislock share a go-redis client of the same settings, "+
			"with the default pool of ten connections a core, on which this library sends commands of several goroutines together; "+
			"rueidislock sends all on one connection, in batches.", c.rounds, c.crowdOps()),
	}
	runners, closeAll, err := runnersOf(c)
	if err != nil {
		return s, err
	}
	defer closeAll()
	rates, err := inRounds(ctx, c, runners)
	if err != nil {
		return s, err
	}
	rates, stalls := withoutStalls(rates)
	fastest := fastestOther(runners, rates)
	t := report.Table{Head: []string{"", "operations a second", "of raw", "of the fastest other, " + runners[fastest].name, "stalls"}}
	chart := report.Chart{Name: "distinct", Title: fmt.Sprintf("Acquire and release, %d goroutines on distinct names", crowd), Y: "operations a second"}
	bars := report.Series{Name: "operations a second"}
	for i, r := range runners {
		rate := median(rates[i]).Center
		t.Add(r.name, fmt.Sprintf("%.0f", rate), interval(ratios(rates[i], rates[0]), 2), interval(ratios(rates[i], rates[fastest]), 2), fmt.Sprint(stalls[i]))
		chart.Labels = append(chart.Labels, r.name)
		bars.Add(0, rate)
	}
	chart.Series = []report.Series{bars}
	r := ratios(rates[1], rates[fastest])
	s.Targets = []report.Target{report.AtLeast(
		fmt.Sprintf("uncontended, %d goroutines: throughput of the fastest other (%s)", crowd, runners[fastest].name), 1.2, r.Center, interval(r, 2))}
	s.Tables, s.Charts = []report.Table{t}, []report.Chart{chart}
	return s, nil
}

// runnersOf returns raw, ours, and then the others.
func runnersOf(c config) (runners []runner, closeAll func(), err error) {
	var closers []func()
	closeAll = func() {
		for _, f := range closers {
			f()
		}
	}
	rdb, err := client(c.url, true)
	if err != nil {
		return nil, nil, err
	}
	closers = append(closers, func() { _ = rdb.Close() })
	runners = append(runners, runner{"raw", func(ctx context.Context, name string) error { return rawOnce(ctx, rdb, name) }})
	for _, p := range append([]peer{peerOf(us), peerOf(usFenced)}, others...) {
		s, err := p.open(c.url, nil)
		if err != nil {
			closeAll()
			return nil, nil, err
		}
		closers = append(closers, s.close)
		runners = append(runners, runner{p.name, s.once})
	}
	return runners, closeAll, nil
}

// inRounds returns the rates of each runner, round by round.
func inRounds(ctx context.Context, c config, runners []runner) ([][]float64, error) {
	rates, prefix := make([][]float64, len(runners)), newName()
	for n := range c.rounds + 1 {
		progress("%d of %d rounds", n, c.rounds)
		for _, i := range rand.Perm(len(runners)) {
			rate, err := together(ctx, runners[i], prefix, c.crowdOps())
			if err != nil && !stalled(ctx, err) {
				return nil, fmt.Errorf("%s: %w", runners[i].name, err)
			}
			if n > 0 { // the first is for warming up
				rates[i] = append(rates[i], rate)
			}
		}
	}
	return rates, nil
}

// together returns how many operations a second the crowd does: none, with an error, if it stalls.
func together(ctx context.Context, r runner, prefix string, ops int) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, crowdLimit)
	defer cancel()
	var wg sync.WaitGroup
	errs := make([]error, crowd)
	start := time.Now()
	for i := range crowd {
		wg.Go(func() {
			name := fmt.Sprint(prefix, ":", r.name, ":", i)
			errs[i] = repeat(ops, func() error { return r.once(ctx, name) })
		})
	}
	wg.Wait()
	rate := float64(crowd*ops) / time.Since(start).Seconds()
	for _, err := range errs {
		if err != nil {
			return 0, err
		}
	}
	return rate, nil
}

func fastestOther(runners []runner, rates [][]float64) int {
	isOther := func(name string) bool {
		return slices.ContainsFunc(others, func(p peer) bool { return p.name == name })
	}
	best, most := 0, 0.0
	for i, r := range runners {
		if rate := median(rates[i]).Center; isOther(r.name) && rate > most {
			best, most = i, rate
		}
	}
	return best
}
