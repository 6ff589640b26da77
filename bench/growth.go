package main

import (
	"context"
	"fmt"
	"math/rand/v2"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/bench/internal/report"
)

// growth measures what a section costs as there is more of everything.
func growth(ctx context.Context, c config) (report.Section, error) {
	s := report.Section{
		Title: "Growth: more waiters, more names, more locks held",
		Text:  "A good curve is flat, or falls. Others are measured as far as they come.",
	}
	for _, grow := range []func(context.Context, config) (report.Table, report.Chart, error){growWaiters, growNames, growHeld} {
		t, chart, err := grow(ctx, c)
		if err != nil {
			return s, err
		}
		s.Tables, s.Charts = append(s.Tables, t), append(s.Charts, chart)
	}
	return s, nil
}

// queuers are those whose waiters grow in number, and how far: beyond it nothing moves, or nothing new is seen.
func queuers() (peers []peer, most []int) {
	passing := func(opts ...lock.Option) func(string, *wire) (*session, error) {
		return func(url string, w *wire) (*session, error) { return ours(url, w, opts...) }
	}
	return []peer{
		{us, passing()},
		{usFenced, passing(lock.WithFencing())},
		{"lock, never passed on", passing(lock.WithMaxHandoffs(0))},
		peerOf(byRueidis),
		peerOf(byFasterPolls),
	}, []int{1 << 30, 1 << 30, 1 << 30, 1000, 100}
}

// growWaiters lets more and more goroutines wait for one lock.
func growWaiters(ctx context.Context, c config) (report.Table, report.Chart, error) {
	t := report.Table{
		Text: fmt.Sprintf("**Waiters** of one process, for %v each, with nothing to do in a section. Without passing on each section is a release in Redis and an acquire:", c.each),
		Head: []string{"waiters", "", "time a section", "of the first", "commands a section", "longest wait"},
	}
	chart := report.Chart{Name: "growth-waiters", Title: "Time of a section, as waiters grow in number", X: "waiters", Y: "microseconds", LogX: true, LogY: true}
	peers, most := queuers()
	for _, p := range peers {
		chart.Series = append(chart.Series, report.Series{Name: p.name})
	}
	for _, n := range c.waiters {
		rows := make([][]string, len(peers))
		for _, i := range rand.Perm(len(peers)) {
			if n > most[i] {
				continue
			}
			progress("%d waiters: %s", n, peers[i].name)
			k := contention{Name: newName(), Goroutines: n + 1, Each: c.each}
			tally, err := contend(ctx, peers[i], c.url, &wire{}, k)
			if err != nil {
				return t, chart, fmt.Errorf("%s: %w", peers[i].name, err)
			}
			rows[i] = waitersRow(n, peers[i].name, &tally, &chart.Series[i])
		}
		for _, row := range rows {
			if row != nil {
				t.Add(row...)
			}
		}
	}
	chart.Series = notEmpty(chart.Series)
	return t, chart, nil
}

func waitersRow(n int, name string, t *tally, curve *report.Series) []string {
	if t.Stalled {
		name += " (stalled)"
	}
	if t.sum() == 0 {
		return []string{fmt.Sprint(n), name, "no section", "", "", brief(t.Longest)}
	}
	micros := 1e6 / t.rate()
	curve.Add(float64(n), micros)
	return []string{
		fmt.Sprint(n), name, fmt.Sprintf("%.3g µs", micros), fmt.Sprintf("%.2f", micros/curve.Y[0]),
		fmt.Sprintf("%.3f", t.commands()), brief(t.Longest),
	}
}

func notEmpty(series []report.Series) []report.Series {
	var some []report.Series
	for _, s := range series {
		if len(s.X) > 0 {
			some = append(some, s)
		}
	}
	return some
}
