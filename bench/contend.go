package main

import (
	"context"
	crand "crypto/rand"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

const patience = 10 * time.Second // with a peer that does not come back when its time is over

// contention is a measurement: goroutines take one lock again and again, and stay a while.
type contention struct {
	Name       string
	Goroutines int
	Each, Work time.Duration // of the measurement, and of a section
	Start      time.Time     // of several processes; zero: at once
}

func newName() string { return "bench:" + crand.Text() }

// contend measures a peer from the beginning, with connections of its own that w makes.
func contend(ctx context.Context, p peer, url string, w *wire, k contention) (tally, error) {
	s, err := p.open(url, w)
	if err != nil {
		return tally{}, err
	}
	time.Sleep(time.Until(k.Start))
	before := w.commands.Load()
	t, err := k.run(ctx, s)
	t.Commands = w.commands.Load() - before
	if !t.Stalled { // else closing it might stall too
		s.close()
	}
	return t, err
}

// run lets the goroutines go, and waits for them, but not for ever.
func (k contention) run(ctx context.Context, s *session) (tally, error) {
	ctx, cancel := context.WithTimeout(ctx, k.Each)
	defer cancel()
	takers := make([]taker, k.Goroutines)
	var inside atomic.Int32
	var two atomic.Bool
	section := func() {
		if inside.Add(1) != 1 {
			two.Store(true)
		}
		if k.Work > 0 {
			time.Sleep(k.Work)
		}
		inside.Add(-1)
	}
	var wg sync.WaitGroup
	begin := time.Now()
	for i := range takers {
		wg.Go(func() { takers[i].take(ctx, s, k.Name, section) })
	}
	back := make(chan struct{})
	go func() {
		wg.Wait()
		close(back)
	}()
	var t tally
	select {
	case <-back:
		for i := range takers {
			t.Waits, t.Longest = append(t.Waits, takers[i].waits...), max(t.Longest, takers[i].longest)
		}
		t.thin(sample)
	case <-time.After(k.Each + patience):
		t.Stalled, t.Longest = true, k.Each+patience
	}
	t.Took = min(time.Since(begin), k.Each+time.Second)
	for i := range takers {
		t.Sections = append(t.Sections, int(takers[i].sections.Load()))
	}
	if two.Load() {
		return t, errors.New("two goroutines were inside")
	}
	return t, nil
}

// taker is a goroutine that wants the lock.
type taker struct {
	sections atomic.Int64
	waits    []time.Duration
	longest  time.Duration
}

func (t *taker) take(ctx context.Context, s *session, name string, section func()) {
	for ctx.Err() == nil {
		asked := time.Now()
		unlock, err := s.lock(ctx, name)
		wait := time.Since(asked)
		t.longest = max(t.longest, wait)
		if err != nil {
			continue
		}
		t.waits = append(t.waits, wait)
		section()
		t.sections.Add(1)
		_ = unlock()
	}
}
