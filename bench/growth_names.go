package main

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/redis/go-redis/v9"

	"github.com/seed-b640e7e9/lock/bench/internal/report"
)

// named are those whose names grow in number, and how far, as going through all of them takes its time.
func named() (peers []peer, most []int) {
	return []peer{peerOf(us), peerOf(usFenced), peerOf(byRueidis)}, []int{1 << 30, 100_000, 100_000}
}

// growNames takes and releases more and more names, one after another.
func growNames(ctx context.Context, c config) (report.Table, report.Chart, error) {
	t := report.Table{
		Text: fmt.Sprintf("**Names**: acquire and release by one goroutine that goes around so many names, after each has been used, in %d pairs of rounds of %d with raw commands "+
			"that do the same. What stays behind is beside the first row. With fencing Redis keeps a counter for each name, which is what fencing is:", growthPairs(c), c.ops),
		Head: []string{"names", "", "time, of raw", "time", "of raw, of the first point", "heap left", "Redis memory left"},
	}
	chart := report.Chart{Name: "growth-names", Title: "Acquire and release, as names grow in number", X: "names", Y: "time of raw, of the first point", LogX: true}
	rdb, err := goRedis(c.url, nil)
	if err != nil {
		return t, chart, err
	}
	defer rdb.Close()
	peers, most := named()
	for i, p := range peers {
		g := nameGrowth{rdb: rdb, prefix: newName(), curve: report.Series{Name: p.name}}
		if err := g.run(ctx, c, p, most[i], &t); err != nil {
			return t, chart, fmt.Errorf("%s: %w", p.name, err)
		}
		chart.Series = append(chart.Series, g.curve)
	}
	return t, chart, nil
}

func growthPairs(c config) int { return max(c.pairs/20, 10) }

// nameGrowth is how one peer grows.
type nameGrowth struct {
	rdb          *redis.Client
	prefix       string
	curve        report.Series
	used         int     // names
	first        float64 // time, of raw
	heap, memory float64 // in the beginning
}

func (g *nameGrowth) run(ctx context.Context, c config, p peer, most int, t *report.Table) error {
	s, err := p.open(c.url, nil)
	if err != nil {
		return err
	}
	defer s.close()
	warm := nameGrowth{prefix: newName()} // else the connections that many goroutines need would count as what is left
	if err := warm.useUpTo(ctx, s, 50*crowd); err != nil {
		return err
	}
	for _, n := range c.names {
		if n > most {
			break
		}
		progress("%d names: %s", n, p.name)
		if err := g.useUpTo(ctx, s, n); err != nil {
			return err
		}
		around := func(once func(ctx context.Context, name string) error) func() error {
			i := 0
			return func() error {
				i++
				return once(ctx, g.name(i%n))
			}
		}
		raw := func(ctx context.Context, name string) error { return rawOnce(ctx, g.rdb, name) }
		r, err := compare(ctx, growthPairs(c), c.ops, contestant{p.name, around(s.once)}, contestant{"raw", around(raw)})
		if err != nil {
			return err
		}
		if err := g.row(ctx, n, r, t); err != nil {
			return err
		}
	}
	return nil
}

func (g *nameGrowth) row(ctx context.Context, n int, r result, t *report.Table) error {
	bytes := heap()
	memory, err := infoNumber(ctx, g.rdb, "memory", "used_memory")
	if err != nil {
		return err
	}
	if g.first == 0 {
		g.first, g.heap, g.memory = r.time.Center, bytes, memory
	}
	growth := r.time.Center / g.first
	g.curve.Add(float64(n), growth)
	t.Add(fmt.Sprint(n), g.curve.Name, interval(r.time, 3), brief(r.each), fmt.Sprintf("%.2f", growth), kibi(bytes-g.heap), kibi(memory-g.memory))
	return nil
}

func kibi(bytes float64) string { return fmt.Sprintf("%.0f KiB", bytes/1024) }

func (g *nameGrowth) name(i int) string { return g.prefix + ":" + strconv.Itoa(i) }

// useUpTo takes and releases the names up to n that have not been yet, by many goroutines as that is faster.
func (g *nameGrowth) useUpTo(ctx context.Context, s *session, n int) error {
	var next atomic.Int64
	next.Store(int64(g.used))
	var wg sync.WaitGroup
	errs := make([]error, crowd)
	for i := range crowd {
		wg.Go(func() {
			for errs[i] == nil {
				mine := int(next.Add(1)) - 1
				if mine >= n {
					return
				}
				errs[i] = s.once(ctx, g.name(mine))
			}
		})
	}
	wg.Wait()
	g.used = max(g.used, n)
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
