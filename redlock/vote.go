package redlock

import (
	"context"
	"errors"
	"math/bits"
	"sync"
	"time"

	"github.com/seed-b640e7e9/lock"
)

// op is what nodes are asked for.
type op struct {
	call func(lock.Store, context.Context, lock.Request) (lock.Reply, error)
	// after, if any, sees each answer, also those that nobody waits for any more.
	after func(v *vote, i int, err error)
}

var (
	taking   = &op{lock.Store.Acquire, func(v *vote, i int, err error) { v.q.took(&v.req, i, err) }}
	renewing = &op{renewOne, nil}
	giving   = &op{lock.Store.Release, (*vote).gave}
)

// renewOne renews one lease.
func renewOne(s lock.Store, ctx context.Context, r lock.Request) (reply lock.Reply, err error) {
	ctx, cancel := context.WithTimeout(ctx, r.Limit)
	defer cancel()
	s.Renew(ctx, []lock.Request{r}, func(_ int, a lock.Reply, e error) { reply, err = a, e })
	return reply, err
}

// vote is one question to several nodes, and the count of their answers. Votes are used again, as all that they are made
// of would cost more than the rest of an acquire.
type vote struct {
	q     *quorum
	calls []func()        // one for each node, to be run in a goroutine
	news  chan struct{}   // gets a value when the vote is decided, and when there is no use in waiting for long
	ctx   context.Context // not a part of the vote, as go-redis may keep it for longer
	op    *op
	req   lock.Request

	mu   sync.Mutex // guards all below; the count is the asker's alone after wait
	uses int        // the asker, and the calls that have not returned
	left bool       // nothing is counted any more
	count
	doubts map[int]time.Time // of a release: nodes where the key may come yet, and until when
}

// values is a context with nothing but the values of another: a call goes on when the asker has left, for as long as
// the request's Limit, as what it finds out spares a clean-up.
type values struct{ context.Context }

func (values) Deadline() (time.Time, bool) { return time.Time{}, false }
func (values) Done() <-chan struct{}       { return nil }
func (values) Err() error                  { return nil }

func newVote(q *quorum) *vote {
	v := &vote{q: q, news: make(chan struct{}, 4), count: count{answers: make([]answer, len(q.nodes))}}
	for i := range q.nodes {
		v.calls = append(v.calls, func() { v.call(i) })
	}
	return v
}

// open prepares a vote of the nodes that nobody has been asked in yet. The asker has to free it.
func (q *quorum) open(ctx context.Context, o *op, r lock.Request, nodes set) *vote {
	v := q.votes.Get().(*vote)
	v.ctx, v.op, v.req = &values{ctx}, o, r
	v.uses, v.left, v.doubts = 1+nodes.len(), false, nil
	v.count = count{need: q.need, open: nodes, answers: v.answers}
	q.count(nodes.len())
	return v
}

func (s set) len() int { return bits.OnesCount16(uint16(s)) }

// start asks nodes.
func (v *vote) start(nodes set) {
	for i := range v.calls {
		if nodes.has(i) {
			go v.calls[i]()
		}
	}
}

// ask opens a vote and starts it.
func (q *quorum) ask(ctx context.Context, o *op, r lock.Request, nodes set) *vote {
	v := q.open(ctx, o, r, nodes)
	v.start(nodes)
	return v
}

var errBusy = errors.New("too many commands under way")

// call asks one node.
func (v *vote) call(i int) {
	n := v.q.nodes[i]
	if !n.enter() {
		v.answer(i, lock.Reply{}, errBusy)
		return
	}
	reply, err := v.op.call(n.Store, v.ctx, v.req)
	n.leave(err)
	v.answer(i, reply, err)
}

// answer counts what a node said.
func (v *vote) answer(i int, reply lock.Reply, err error) {
	v.mu.Lock()
	if !v.left {
		done, poor := v.done(), v.poor()
		v.add(i, reply, err)
		if done != v.done() || poor != v.poor() {
			v.news <- struct{}{}
		}
	}
	v.mu.Unlock()
	if v.op.after != nil {
		v.op.after(v, i, err)
	}
	v.q.count(-1)
	v.free()
}

// grace is how long slow nodes are waited for then.
const grace = 50 * time.Millisecond

// wait returns when the vote is decided, or ctx ends. From then on answers are not counted.
func (v *vote) wait(ctx context.Context) {
	defer v.leave()
	var over <-chan time.Time
	for ctx.Err() == nil {
		done, poor := v.state()
		switch {
		case done:
			return
		case poor && over == nil:
			timer := time.NewTimer(grace)
			defer timer.Stop()
			over = timer.C
		}
		select {
		case <-v.news:
		case <-over:
			return
		case <-ctx.Done():
		}
	}
}

func (v *vote) state() (done, poor bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.done(), v.poor()
}

// leave ends the counting.
func (v *vote) leave() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.left = true
	for len(v.news) > 0 {
		<-v.news
	}
}

// free ends one use of the vote.
func (v *vote) free() {
	v.mu.Lock()
	v.uses--
	last := v.uses == 0
	v.mu.Unlock()
	if last {
		clear(v.answers)
		v.ctx, v.req = nil, lock.Request{}
		v.q.votes.Put(v)
	}
}
