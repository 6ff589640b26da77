package wait

import (
	"context"
	"math/rand/v2"
	"time"
)

const (
	first = 5 * time.Millisecond
	poll  = 250 * time.Millisecond // the longest pause of one who has to ask

	// Fallback is the longest pause of one who is told of releases: some releases tell nobody.
	Fallback = time.Second
)

// Pause is the pause between two tries: it grows from try to try, and is jittered so that waiters do not march in step.
// The zero value is ready.
type Pause struct{ pause time.Duration }

// Next returns how long to sleep before the next try, when nobody tells of a release. A positive remaining is how long
// the holder's lease still lasts unless it is renewed or released: there is no use in sleeping longer.
func (p *Pause) Next(remaining time.Duration) time.Duration {
	if p.pause == 0 {
		p.pause = first
	}
	d := p.pause/2 + rand.N(p.pause/2)
	p.pause = min(p.pause*3/2, poll)
	return atMost(d, remaining)
}

// Told is Next for one who is told of releases.
func (p *Pause) Told(remaining time.Duration) time.Duration {
	return atMost(Fallback-rand.N(Fallback/4), remaining)
}

func atMost(d, remaining time.Duration) time.Duration {
	if remaining > 0 {
		return min(d, remaining+time.Millisecond)
	}
	return d
}

// Sleep returns after d, or earlier when ctx ends; it tells whether ctx is still alive.
func Sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
	return ctx.Err() == nil
}
