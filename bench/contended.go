package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/seed-b640e7e9/lock/bench/internal/report"
)

// works are how long a section takes: nothing, which shows what the lock costs, and what a fast statement takes.
var works = []time.Duration{0, time.Millisecond}

const aboutContention = "Commands are counted on the connections. A wait that was not over in the end counts for the longest. " +
	"Jain's index is 1 if all goroutines got the same, and 1/n if one of n got all."

func contended(ctx context.Context, c config) (report.Section, error) {
	s := report.Section{
		Title: "Contended: goroutines of one process want one lock",
		Text:  fmt.Sprintf("%v for each measurement, in random order for each number of goroutines. %s", c.each, aboutContention),
	}
	chart := report.Chart{Name: "contended", Title: "One lock, nothing to do under it", X: "goroutines", Y: "sections a second", LogX: true, LogY: true}
	for _, work := range works {
		t := report.Table{Text: fmt.Sprintf("A section takes %v:", work), Head: tallyHead("goroutines")}
		for _, n := range c.goroutines {
			tallies, err := crowds(ctx, c, n, work, 0)
			if err != nil {
				return s, err
			}
			for i := range tallies {
				t.Rows = append(t.Rows, tallies[i].row(n, waiting[i].name))
			}
			if work == 0 {
				chart.Series = plotted(chart.Series, n, tallies)
			}
			if n == 64 {
				s.Targets = append(s.Targets, commandTarget(fmt.Sprintf("commands a section of %v, one process of 64", work), 0.1, tallies[0]))
			}
		}
		s.Tables = append(s.Tables, t)
	}
	s.Charts = []report.Chart{chart}
	duels, targets, err := duel(ctx, c)
	s.Tables, s.Targets = append(s.Tables, duels), append(targets, s.Targets...)
	return s, err
}

func commandTarget(what string, limit float64, t tally) report.Target {
	return report.AtMost(what, limit, t.commands(), fmt.Sprintf("%.3f", t.commands()))
}

// crowds returns a tally of each of those who can wait, with a delay in each round trip.
func crowds(ctx context.Context, c config, n int, work, delay time.Duration) ([]tally, error) {
	tallies := make([]tally, len(waiting))
	for _, i := range rand.Perm(len(waiting)) {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		progress("%d goroutines, sections of %v: %s", n, work, waiting[i].name)
		k := contention{Name: newName(), Goroutines: n, Each: c.each, Work: work}
		t, err := contend(ctx, waiting[i], c.url, &wire{delay: delay}, k)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", waiting[i].name, err)
		}
		tallies[i] = t
	}
	return tallies, nil
}

// plotted adds a point to the curve of each peer.
func plotted(series []report.Series, n int, tallies []tally) []report.Series {
	if series == nil {
		for _, p := range waiting {
			series = append(series, report.Series{Name: p.name})
		}
	}
	for i := range tallies {
		series[i].Add(float64(n), max(tallies[i].rate(), 1))
	}
	return series
}
