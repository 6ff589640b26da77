package redlock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/seed-b640e7e9/lock"
)

// scatter is the time within which those who are woken by less than a quorum try: messages of several nodes become one.
const scatter = 4 * time.Millisecond

// ears are those of one who waits: at each node.
type ears struct {
	q      *quorum
	wake   func(from string)
	cancel context.CancelFunc
	news   chan struct{} // gets a value when there is more to know of who listens

	mu    sync.Mutex // guards all below
	stops []func()
	errs  []error
	ended bool

	pending bool   // a release has been told of
	told    bool   // and it has been passed on
	nodes   set    // by these
	from    string // this is who released; empty if they differ
}

// Listen listens at all nodes, and returns when it does so at a quorum, or at as many as can be reached. It goes on at the
// others in the background: a node that can't be listened to is not needed.
func (q *quorum) Listen(ctx context.Context, key lock.Key, wake func(from string)) (stop func(), err error) {
	inner, cancel := context.WithTimeout(context.WithoutCancel(ctx), maxPatience)
	e := &ears{q: q, wake: wake, cancel: cancel, news: make(chan struct{}, len(q.nodes))}
	q.count(len(q.nodes))
	for i := range q.nodes {
		go e.listen(inner, key, i)
	}
	for !e.enough() {
		select {
		case <-e.news:
		case <-ctx.Done():
			e.end()
			return nil, ctx.Err()
		}
	}
	if err := e.deaf(); err != nil {
		e.end()
		return nil, err
	}
	return e.end, nil
}

func (e *ears) listen(ctx context.Context, key lock.Key, i int) {
	defer e.q.count(-1)
	n := e.q.nodes[i]
	stop, err := func() {}, errBusy
	if n.enter() {
		stop, err = n.Listen(ctx, key, func(from string) { e.hear(i, from) })
		n.leave(err)
	}
	e.mu.Lock()
	switch {
	case err != nil:
		e.errs = append(e.errs, &NodeError{i, err})
	case e.ended:
		defer stop()
	default:
		e.stops = append(e.stops, stop)
	}
	e.mu.Unlock()
	e.news <- struct{}{}
}

// enough tells whether a quorum listens, or no more can be had.
func (e *ears) enough() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.stops) >= e.q.need || len(e.stops)+len(e.errs) == len(e.q.nodes)
}

// deaf is the error of one who hears no node.
func (e *ears) deaf() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.stops) > 0 {
		return nil
	}
	all := errors.Join(e.errs...)
	for _, err := range e.errs {
		if !errors.Is(err, errors.ErrUnsupported) {
			return fmt.Errorf("no node listens: %w", all)
		}
	}
	return all
}

// end ends listening.
func (e *ears) end() {
	e.mu.Lock()
	stops := e.stops
	e.stops, e.ended = nil, true
	e.mu.Unlock()
	e.cancel()
	for _, stop := range stops {
		stop()
	}
}

// hear counts what node i tells. A release that a quorum tells of is passed on at once; one that fewer tell of, as nodes
// may be deaf, a little later. What the others tell of it says nothing new.
func (e *ears) hear(i int, from string) {
	e.mu.Lock()
	if e.told && (e.nodes.has(i) || from != e.from) {
		e.pending = false // the next release
	}
	if !e.pending {
		e.pending, e.told, e.nodes, e.from = true, false, 0, from
		time.AfterFunc(rand.N(scatter), e.pass)
	}
	if from != e.from {
		e.from = ""
	}
	e.nodes.add(i)
	now := !e.told && !e.ended && e.nodes.len() >= e.q.need
	e.told = e.told || now
	from = e.from
	e.mu.Unlock()
	if now {
		e.wake(from)
	}
}

// pass passes on what less than a quorum has told.
func (e *ears) pass() {
	e.mu.Lock()
	now, from := e.pending && !e.told && !e.ended, e.from
	e.pending = false
	e.mu.Unlock()
	if now {
		e.wake(from)
	}
}
