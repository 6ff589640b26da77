package redlock

import (
	"context"
	"errors"
	"sync"

	"github.com/seed-b640e7e9/lock"
)

// Renew counts the nodes that hold the token now. While they are a quorum, nodes that have lost it get it again.
func (q *quorum) Renew(ctx context.Context, rs []lock.Request, done func(int, lock.Reply, error)) {
	var wg sync.WaitGroup
	var plain []int
	for i, r := range rs {
		if r.Count == 0 {
			plain = append(plain, i)
			continue
		}
		wg.Go(func() {
			reply, err := q.prolong(ctx, r)
			done(i, reply, err)
		})
	}
	if len(plain) > 0 {
		q.renew(ctx, rs, plain, done)
	}
	wg.Wait()
}

// prolong reserves fences. The block that ends with the highest answer lies above all that was granted before, as each
// quorum has a node of the one that agreed last.
func (q *quorum) prolong(ctx context.Context, r lock.Request) (lock.Reply, error) {
	r.Limit = patience(r.TTL)
	v := q.ask(ctx, renewing, r, q.all)
	defer v.free()
	v.wait(ctx)
	if err := q.verdict(ctx, r, &v.count); err != nil {
		return lock.Reply{}, err
	}
	reply := lock.Reply{Listeners: v.listeners()}
	if r.Fence == lock.FenceOff {
		return reply, nil
	}
	f, failed := q.agree(ctx, v)
	if failed != nil {
		return lock.Reply{}, q.verdict(ctx, r, failed)
	}
	reply.Fence = f
	return reply, nil
}

// verdict is what a vote means for a lease. A lease that is lost is given up everywhere: else nodes that still have it, or
// get it yet, would keep it from others. But not if its holder has ended it: nodes may lack it as its release is under way,
// which would find it gone at those that are told twice.
func (q *quorum) verdict(ctx context.Context, r lock.Request, c *count) error {
	if c.won() {
		return nil
	}
	err := c.loss(ctx)
	if errors.Is(err, lock.ErrLost) && (r.Live == nil || r.Live()) {
		left := lock.Request{Key: r.Key, Token: r.Token, TTL: r.TTL, Limit: patience(r.TTL)}
		v := q.release(ctx, left, q.all, 0)
		v.leave()
		v.free()
	}
	return err
}

// batch is a renewal of many leases at once: one pipeline a node.
type batch struct {
	q    *quorum
	rs   []lock.Request
	done func(k int, err error)

	mu      sync.Mutex // guards all below
	tallies []tally
	open    int           // leases that are not settled
	settled chan struct{} // closed when there are none
}

// tally is the count of one lease.
type tally struct {
	count
	settled bool
}

// renew renews the leases of rs that are named by their indexes.
func (q *quorum) renew(ctx context.Context, rs []lock.Request, which []int, done func(int, lock.Reply, error)) {
	b := &batch{
		q: q, rs: make([]lock.Request, len(which)), tallies: make([]tally, len(which)),
		done: func(k int, err error) { done(which[k], lock.Reply{}, err) },
		open: len(which), settled: make(chan struct{}),
	}
	answers := make([]answer, len(which)*len(q.nodes))
	for k, i := range which {
		b.rs[k] = rs[i]
		own := answers[k*len(q.nodes):][:len(q.nodes)]
		b.tallies[k] = tally{count: count{need: q.need, open: q.all, answers: own}}
	}
	q.count(len(q.nodes))
	for i := range q.nodes {
		go b.ask(ctx, i)
	}
	select {
	case <-b.settled:
	case <-ctx.Done():
		b.giveUp(ctx)
	}
}

// giveUp settles what is open when ctx ends.
func (b *batch) giveUp(ctx context.Context) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for k := range b.tallies {
		b.settleLocked(ctx, k)
	}
}

// settleLocked tells the outcome of a renewal, once.
func (b *batch) settleLocked(ctx context.Context, k int) {
	t := &b.tallies[k]
	if t.settled {
		return
	}
	t.settled = true
	b.done(k, b.q.verdict(ctx, b.rs[k], &t.count))
	if b.open--; b.open == 0 {
		close(b.settled)
	}
}

// ask renews at one node. What is under way when ctx ends goes on for a while: it says whether the node has the token.
func (b *batch) ask(ctx context.Context, i int) {
	defer b.q.count(-1)
	n := b.q.nodes[i]
	if !n.enter() {
		for k := range b.rs {
			b.answer(ctx, k, i, errBusy)
		}
		return
	}
	ttl := b.rs[0].TTL
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(max(patience(ttl), ttl/3), maxRenewal))
	defer cancel()
	n.Renew(limited, b.rs, func(k int, _ lock.Reply, err error) { b.answer(ctx, k, i, err) })
	n.leave(limited.Err())
}

// answer counts what node i said of lease k.
func (b *batch) answer(ctx context.Context, k, i int, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	t := &b.tallies[k]
	t.add(i, lock.Reply{}, err)
	if t.won() {
		b.restore(k, t)
	}
	if t.done() {
		b.settleLocked(ctx, k)
	}
}

// restore gives the token back to the nodes that have lost it.
func (b *batch) restore(k int, t *tally) {
	for i := range b.q.nodes {
		if t.lost.has(i) {
			b.q.install(b.rs[k], i)
		}
	}
	t.lost = 0
}
