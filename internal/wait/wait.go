// Package wait decides how long a waiter sleeps between two tries, and sleeps.
package wait

import (
	"context"
	"math/rand/v2"
	"time"
)

const (
	first    = 5 * time.Millisecond
	fallback = 250 * time.Millisecond // the longest pause; whoever releases does not tell, so somebody has to ask
)

// Poll is the pause of one waiter: it grows from try to try, and is jittered so that waiters do not march in step.
// The zero value is ready.
type Poll struct{ pause time.Duration }

// Next returns how long to sleep before the next try. A positive remaining is how long the holder's lease still lasts
// unless it is renewed or released: there is no use in sleeping longer.
func (p *Poll) Next(remaining time.Duration) time.Duration {
	if p.pause == 0 {
		p.pause = first
	}
	d := p.pause/2 + rand.N(p.pause/2)
	p.pause = min(p.pause*3/2, fallback)
	if remaining > 0 {
		d = min(d, remaining+time.Millisecond)
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
