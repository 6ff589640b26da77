package main

import (
	"context"
	"fmt"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/bench/internal/report"
)

// growHeld takes and releases one lock while the same process holds more and more of them. Only who renews can hold.
func growHeld(ctx context.Context, c config) (report.Table, report.Chart, error) {
	t := report.Table{
		Text: fmt.Sprintf("**Locks held** by the same Locker, TTL %v, while one goroutine acquires and releases one more, in %d pairs of rounds of %d with raw commands:",
			c.holdTTL, growthPairs(c), c.ops),
		Head: []string{"held", "", "time, of raw", "time", "of the first", "raw at the same time"},
	}
	chart := report.Chart{Name: "growth-held", Title: "Acquire and release, as locks held grow in number", X: "locks held", Y: "time, of the first point", LogX: true}
	keepers := []peer{
		{us, func(url string, w *wire) (*session, error) { return ours(url, w, lock.WithTTL(c.holdTTL)) }},
		{byRueidis, func(url string, w *wire) (*session, error) { return openRueidislock(url, w, c.holdTTL) }},
	}
	for i, most := range []int{1 << 30, 10_000} {
		g := heldGrowth{curve: report.Series{Name: keepers[i].name}, raw: report.Series{Name: "raw, beside " + keepers[i].name}}
		if err := g.run(ctx, c, keepers[i], most, &t); err != nil {
			return t, chart, fmt.Errorf("%s: %w", keepers[i].name, err)
		}
		chart.Series = append(chart.Series, g.curve, g.raw)
	}
	return t, chart, nil
}

// heldGrowth is how one peer grows.
type heldGrowth struct {
	curve, raw report.Series
	first      result
	unlock     []func() error
}

func (g *heldGrowth) run(ctx context.Context, c config, p peer, most int, t *report.Table) (err error) {
	s, err := p.open(c.url, nil)
	if err != nil {
		return err
	}
	defer s.close()
	defer func() {
		progress("%s gives up %d locks", p.name, len(g.unlock))
		for _, unlock := range g.unlock {
			if failed := unlock(); err == nil {
				err = failed
			}
		}
	}()
	rdb, err := goRedis(c.url, nil)
	if err != nil {
		return err
	}
	defer rdb.Close()
	prefix := newName()
	for _, n := range c.held {
		if n > most {
			break
		}
		for len(g.unlock) < n {
			progress("%s: %d of %d locks held", p.name, len(g.unlock), n)
			unlock, err := s.lock(ctx, fmt.Sprint(prefix, ":", len(g.unlock)))
			if err != nil {
				return err
			}
			g.unlock = append(g.unlock, unlock)
		}
		one := contestant{p.name, func() error { return s.once(ctx, prefix) }}
		r, err := compare(ctx, growthPairs(c), c.ops, one, contestant{"raw", rawPair(ctx, rdb)})
		if err != nil {
			return err
		}
		if g.first.each == 0 {
			g.first = r
		}
		growth := float64(r.each) / float64(g.first.each)
		g.curve.Add(float64(n), growth)
		g.raw.Add(float64(n), float64(r.with)/float64(g.first.with))
		t.Add(fmt.Sprint(n), p.name, interval(r.time, 3), brief(r.each), fmt.Sprintf("%.2f", growth), brief(r.with))
	}
	return nil
}
