package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/seed-b640e7e9/lock/bench/internal/report"
)

const (
	inEach  = 8                      // goroutines of a process
	startIn = 300 * time.Millisecond // until when all processes are there
)

// contendJob is contention in a child.
type contendJob struct {
	Peer, URL  string
	Contention contention
}

func (j contendJob) run() (any, error) {
	t, err := contend(context.Background(), peerOf(j.Peer), j.URL, &wire{}, j.Contention)
	t.thin(sample / 8)
	return t, err
}

func processes(ctx context.Context, c config) (report.Section, error) {
	s := report.Section{
		Title: "Contended: several processes",
		Text:  fmt.Sprintf("Processes of %d goroutines each want one lock, for %v. %s", inEach, c.each, aboutContention),
	}
	chart := report.Chart{Name: "processes", Title: "Processes of 8 goroutines want one lock, nothing to do under it", X: "processes", Y: "sections a second", LogX: true, LogY: true}
	for _, work := range works {
		t := report.Table{Text: fmt.Sprintf("A section takes %v:", work), Head: tallyHead("processes")}
		for _, n := range c.procs {
			tallies, err := families(ctx, c, n, work)
			if err != nil {
				return s, err
			}
			for i := range tallies {
				t.Rows = append(t.Rows, tallies[i].row(n, waiting[i].name))
			}
			if work == 0 {
				chart.Series = plotted(chart.Series, n, tallies)
			}
			if n == 8 {
				s.Targets = append(s.Targets, commandTarget(fmt.Sprintf("commands a section of %v, 8 processes of 8", work), 6, tallies[0]))
			}
		}
		s.Tables = append(s.Tables, t)
	}
	s.Charts = []report.Chart{chart}
	return s, nil
}

// families returns a tally of each of those who can wait, in n processes.
func families(ctx context.Context, c config, n int, work time.Duration) ([]tally, error) {
	tallies := make([]tally, len(waiting))
	for i, p := range waiting {
		progress("%d processes, sections of %v: %s", n, work, p.name)
		k := contention{Name: newName(), Goroutines: inEach, Each: c.each, Work: work}
		t, err := children(ctx, n, contendJob{p.name, c.url, k})
		if err != nil {
			return nil, fmt.Errorf("%s: %w", p.name, err)
		}
		tallies[i] = t
	}
	return tallies, nil
}

// children has n processes do a job at the same time.
func children(ctx context.Context, n int, j contendJob) (tally, error) {
	j.Contention.Start = time.Now().Add(startIn)
	tallies, errs := make([]tally, n), make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = inChild(ctx, job{Contend: &j}, &tallies[i]) })
	}
	wg.Wait()
	var all tally
	for i := range n {
		if errs[i] != nil {
			return all, errs[i]
		}
		all.add(tallies[i])
	}
	return all, nil
}
