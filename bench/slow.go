package main

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/seed-b640e7e9/lock/bench/internal/report"
)

// delays are added to each round trip. The difference between the two is what counts: it leaves out all that takes the
// same time on a fast network.
var delays = [2]time.Duration{time.Millisecond, 10 * time.Millisecond}

// waitsAfar is how long one waits before the release: long enough to have subscribed.
const waitsAfar = 100 * time.Millisecond

// slowLink measures how many round trips operations really take, and contention on a slow network.
func slowLink(ctx context.Context, c config) (report.Section, error) {
	s := report.Section{
		Title: "A slow network",
		Text: fmt.Sprintf("Each round trip takes %v or %v longer. Round trips are what an operation takes longer on the second network than on the first, "+
			"divided by what PING takes longer; times are medians of %d. Those who poll have no handoff to count.", delays[0], delays[1], c.tries()),
	}
	t := report.Table{Head: []string{"", "operation", "time at 1 ms", "at 10 ms", "round trips"}}
	trip, err := slowPings(ctx, c)
	if err != nil {
		return s, err
	}
	t.Add("PING", "", brief(trip.at[0]), brief(trip.at[1]), "1")
	for _, p := range waiting {
		if p.name == bySlowPolls {
			continue
		}
		progress("round trips: %s", p.name)
		trips, err := roundTrips(ctx, c, p)
		if stalled(ctx, err) {
			t.Add(p.name, "stalled", "", "", "")
			continue
		}
		if err != nil {
			return s, fmt.Errorf("%s: %w", p.name, err)
		}
		for _, op := range trips {
			n := max(float64(op.at[1]-op.at[0])/float64(trip.at[1]-trip.at[0]), 0)
			t.Add(p.name, op.name, brief(op.at[0]), brief(op.at[1]), fmt.Sprintf("%.2f", n))
			if p.name == us && !op.between {
				n = math.Round(10*n) / 10
				s.Targets = append(s.Targets, report.AtMost("round trips on a slow network: "+op.name, op.target, n, fmt.Sprintf("%.1f", n)))
			}
		}
	}
	busy := report.Table{
		Text: fmt.Sprintf("Goroutines of one process want one lock, with %v added, for %v each:", delays[0], c.each),
		Head: tallyHead("goroutines"),
	}
	for _, n := range []int{8, 64} {
		tallies, err := crowds(ctx, c, n, 0, delays[0])
		if err != nil {
			return s, err
		}
		for i := range tallies {
			busy.Rows = append(busy.Rows, tallies[i].row(n, waiting[i].name))
		}
	}
	s.Tables = []report.Table{t, busy}
	return s, nil
}

// slowOp is an operation at both delays.
type slowOp struct {
	name    string
	at      [2]time.Duration
	target  float64 // round trips
	between bool    // processes
}

// slowPings measures one round trip.
func slowPings(ctx context.Context, c config) (slowOp, error) {
	var op slowOp
	for i, delay := range delays {
		rdb, err := goRedis(c.url, &wire{delay: delay})
		if err != nil {
			return op, err
		}
		defer rdb.Close()
		times, err := pings(ctx, rdb)
		if err != nil {
			return op, err
		}
		slices.Sort(times)
		op.at[i] = at(times, 0.5)
	}
	return op, nil
}

func roundTrips(ctx context.Context, c config, p peer) ([]slowOp, error) {
	ops := []slowOp{
		{name: "acquire", target: 1}, {name: "release", target: 1},
		{name: "handoff in a process", target: 0}, {name: "handoff between processes", between: true},
	}
	if p.name == byRedsync || p.name == byFasterPolls {
		ops = ops[:2]
	}
	for i, delay := range delays {
		a, err := p.open(c.url, &wire{delay: delay})
		if err != nil {
			return nil, err
		}
		defer a.close()
		b, err := p.open(c.url, &wire{delay: delay})
		if err != nil {
			return nil, err
		}
		defer b.close()
		if ops[0].at[i], ops[1].at[i], err = freeTimes(ctx, a, c.tries()); err != nil {
			return nil, err
		}
		for j := range ops[2:] {
			times, err := handoffTimes(ctx, a, []*session{a, b}[j], c.tries())
			if err != nil {
				return nil, err
			}
			ops[2+j].at[i] = times
		}
	}
	return ops, nil
}

// freeTimes returns the medians of taking and of releasing a free lock.
func freeTimes(ctx context.Context, s *session, n int) (acquire, release time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, handoffLimit)
	defer cancel()
	name := newName()
	var acquires, releases []time.Duration
	for i := range n + 2 {
		start := time.Now()
		unlock, err := s.lock(ctx, name)
		if err != nil {
			return 0, 0, err
		}
		held := time.Now()
		if err := unlock(); err != nil {
			return 0, 0, err
		}
		if i >= 2 { // connections are made and scripts are loaded
			acquires, releases = append(acquires, held.Sub(start)), append(releases, time.Since(held))
		}
	}
	slices.Sort(acquires)
	slices.Sort(releases)
	return at(acquires, 0.5), at(releases, 0.5), nil
}

// handoffTimes returns the median of handoffs, after some that make the connections.
func handoffTimes(ctx context.Context, a, b *session, n int) (time.Duration, error) {
	times, err := toAndFro(a, b, n+4, waitsAfar)(ctx)
	if err != nil {
		return 0, err
	}
	times = times[4:]
	slices.Sort(times)
	return at(times, 0.5), nil
}
