package redistest

import (
	"sync"
	"time"
)

// parcel is something on its way through a line.
type parcel struct {
	due    time.Time       // not before
	hold   <-chan struct{} // not before this is closed, unless nil
	arrive func()
	last   bool // nothing follows
}

// line is one direction of a connection. Parcels arrive in the order in which they were sent, each no sooner than it is
// due, and none waits for another's delay to begin.
type line struct {
	gate func() <-chan struct{} // asked before each arrival: not before this is closed, unless nil

	mu    sync.Mutex // guards queue
	queue []parcel
	wake  chan struct{}
}

func newLine(gate func() <-chan struct{}) *line {
	return &line{gate: gate, wake: make(chan struct{}, 1)}
}

func (l *line) send(p parcel) {
	l.mu.Lock()
	l.queue = append(l.queue, p)
	l.mu.Unlock()
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// run delivers parcels up to the last, or until done is closed. What is on its way then is lost.
func (l *line) run(done <-chan struct{}) {
	for {
		p, ok := l.next(done)
		if !ok || !waitFor(p.hold, done) || !waitUntil(p.due, done) || !waitFor(l.gate(), done) {
			return
		}
		p.arrive()
		if p.last {
			return
		}
	}
}

func (l *line) next(done <-chan struct{}) (parcel, bool) {
	for {
		if p, ok := l.pop(); ok {
			return p, true
		}
		if !waitFor(l.wake, done) {
			return parcel{}, false
		}
	}
}

func (l *line) pop() (parcel, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queue) == 0 {
		return parcel{}, false
	}
	p := l.queue[0]
	l.queue = l.queue[1:]
	return p, true
}

// waitFor reports whether ch was ready and done was not. A nil ch always is ready.
func waitFor(ch, done <-chan struct{}) bool {
	if ch != nil {
		select {
		case <-ch:
		case <-done:
		}
	}
	select {
	case <-done:
		return false
	default:
		return true
	}
}

// waitUntil reports whether due came, and done did not.
func waitUntil(due time.Time, done <-chan struct{}) bool {
	d := time.Until(due)
	if d <= 0 {
		return true
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-done:
		return false
	}
}
