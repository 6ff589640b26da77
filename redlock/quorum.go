package redlock

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/internal/sweep"
)

const (
	inFlight  = 512  // commands under way at a node that does not answer: beyond that it counts as failed at once
	manyMore  = 4096 // and at any node
	sweeps    = 8    // clean-ups of a node at a time
	maxSweeps = 1024 // and waiting for that: beyond it a key is left to its TTL

	deaf        = 100 * time.Millisecond // a node that has answered nothing for so long does not answer
	maxPatience = time.Second
	maxRenewal  = 3 * time.Second // for the answer to a pipeline of renewals
)

// patience is how long one node is given for a command: well under the TTL, so that a silent one costs no lease.
func patience(ttl time.Duration) time.Duration {
	return min(max(ttl/20, 250*time.Millisecond), ttl/2, maxPatience)
}

// node is one of the nodes, and what is under way there.
type node struct {
	lock.Store
	busy    atomic.Int32 // commands
	began   time.Time
	heard   atomic.Int64 // when it last answered, in nanoseconds since began
	sweeper *sweep.Sweeper
}

// enter tells whether a command may be sent; then leave must follow.
func (n *node) enter() bool {
	switch busy := n.busy.Add(1); {
	case busy <= inFlight:
		return true
	case busy <= manyMore && time.Since(n.began)-time.Duration(n.heard.Load()) < deaf:
		return true
	}
	n.busy.Add(-1)
	return false
}

func (n *node) leave(err error) {
	n.busy.Add(-1)
	if !errors.Is(err, lock.ErrUnknown) && !errors.Is(err, context.DeadlineExceeded) {
		n.heard.Store(int64(time.Since(n.began)))
	}
}

// clear releases at the node, in the background, until that has worked. If the key may come yet, it goes on until then.
func (n *node) clear(r lock.Request, until time.Time, mayCome bool) {
	if n.sweeper.Left() >= maxSweeps {
		return
	}
	keep := time.Now().Add(r.Hold)
	n.sweeper.Add(sweep.Task{Until: until, Do: func(ctx context.Context) bool {
		if r.Hold > 0 {
			r.Hold = max(time.Until(keep), time.Millisecond)
		}
		_, err := n.Release(ctx, r)
		return !mayCome && (err == nil || errors.Is(err, lock.ErrLost)) || lock.IsPermanent(err)
	}})
}

// quorum is the Store over all nodes. Whatever it asks it asks them at the same time, and answers as soon as that is
// decided.
type quorum struct {
	nodes []*node
	need  int
	all   set
	votes sync.Pool

	mu     sync.Mutex        // guards all below
	tokens map[string]*token // of which some node may have more to say
	busy   int               // calls of nodes that have not returned
	idle   chan struct{}     // closed when busy becomes 0; nil while nobody waits for that
}

var _ lock.Store = (*quorum)(nil)

func newQuorum(stores []lock.Store) *quorum {
	q := &quorum{need: len(stores)/2 + 1, all: 1<<len(stores) - 1, tokens: map[string]*token{}}
	for _, s := range stores {
		q.nodes = append(q.nodes, &node{Store: s, began: time.Now(), sweeper: sweep.New(sweeps, maxPatience)})
	}
	q.votes.New = func() any { return newVote(q) }
	return q
}

func (q *quorum) count(n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.countLocked(n)
}

func (q *quorum) countLocked(n int) {
	q.busy += n
	if q.busy == 0 && q.idle != nil {
		close(q.idle)
		q.idle = nil
	}
}

// Wait waits for all that goes on in the background, at each node.
func (q *quorum) Wait(ctx context.Context) error {
	for {
		if err := q.wait(ctx); err != nil {
			return err
		}
		for _, n := range q.nodes {
			if err := n.sweeper.Wait(ctx); err != nil {
				return err
			}
			if err := n.Store.Wait(ctx); err != nil {
				return err
			}
		}
		if q.still() {
			return nil
		}
	}
}

func (q *quorum) wait(ctx context.Context) error {
	q.mu.Lock()
	if q.busy == 0 {
		q.mu.Unlock()
		return nil
	}
	if q.idle == nil {
		q.idle = make(chan struct{})
	}
	idle := q.idle
	q.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (q *quorum) still() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, n := range q.nodes {
		if n.sweeper.Left() > 0 {
			return false
		}
	}
	return q.busy == 0
}

// set is a set of nodes, a bit for each.
type set uint16

func (s set) has(i int) bool { return s>>i&1 == 1 }

func (s *set) add(i int)    { *s |= 1 << i }
func (s *set) remove(i int) { *s &^= 1 << i }
