package redlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/bits"
	"slices"
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

// count is the state of a vote.
type count struct {
	need    int
	open    set      // nodes that have not answered
	answers []answer // of the others
	yes     set
	held    set
	lost    set
	unknown set
}

// answer is what one node said.
type answer struct {
	reply lock.Reply
	err   error
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

func (c *count) add(i int, reply lock.Reply, err error) {
	c.answers[i] = answer{reply, err}
	c.open.remove(i)
	switch {
	case err == nil:
		c.yes.add(i)
	case errors.Is(err, lock.ErrHeld):
		c.held.add(i)
	case errors.Is(err, lock.ErrLost):
		c.lost.add(i)
	case errors.Is(err, lock.ErrUnknown):
		c.unknown.add(i)
	}
}

// done tells whether the answers to come can change nothing.
func (c *count) done() bool {
	no, open := (c.held | c.lost).len(), c.open.len()
	return c.yes.len() >= c.need || c.hopeless() && (no >= c.need || no+open < c.need)
}

// hopeless tells whether the answers to come can bring no quorum.
func (c *count) hopeless() bool { return c.yes.len()+c.open.len() < c.need }

// poor tells whether slow nodes are not worth waiting for: the vote is lost, so that they could only tell why, or others
// have votes, and keeping the own ones from them helps nobody.
func (c *count) poor() bool { return c.hopeless() || c.held != 0 }

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

// won tells whether a quorum has said yes.
func (c *count) won() bool { return c.yes.len() >= c.need }

// errs is what the nodes said that did not say yes; nil if there are none.
func (c *count) errs() error {
	var errs nodeErrors
	for i, a := range c.answers {
		if a.err != nil {
			errs = append(errs, &NodeError{i, unmarked(a.err)})
		}
	}
	if errs == nil {
		return nil
	}
	return errs
}

// unmarked is err without the mark of Permanent, which is true of the node but maybe not of the quorum.
func unmarked(err error) error {
	if lock.IsPermanent(err) {
		if inner := errors.Unwrap(err); inner != nil {
			return inner
		}
	}
	return err
}

// wrap adds what the nodes said to err.
func (c *count) wrap(err error) error {
	if errs := c.errs(); errs != nil {
		return fmt.Errorf("%w: %w", err, errs)
	}
	return err
}

// permanent tells whether waiting can't bring a quorum, as too many nodes refuse for good.
func (c *count) permanent() bool {
	n := 0
	for _, a := range c.answers {
		if lock.IsPermanent(a.err) {
			n++
		}
	}
	return n > len(c.answers)-c.need
}

// noQuorum is the error of a vote that too few nodes took part in.
func (c *count) noQuorum() error {
	if err := c.wrap(ErrNoQuorum); !c.permanent() {
		return err
	} else {
		return lock.Permanent(err)
	}
}

// undecided is the error of a vote that ctx has ended.
func (c *count) undecided(ctx context.Context) error {
	return c.wrap(fmt.Errorf("%w: no quorum of answers: %w", lock.ErrUnknown, cmp.Or(context.Cause(ctx), errTooSlow)))
}

var errTooSlow = errors.New("nodes are too slow")

// refusal is the error of a failed vote on a lock.
func (c *count) refusal(ctx context.Context) error {
	switch {
	case c.oneHolder() >= c.need:
		return c.wrap(lock.ErrHeld)
	case !c.done() && ctx.Err() != nil:
		return c.undecided(ctx)
	case c.split():
		return c.wrap(ErrSplit)
	default:
		return c.noQuorum()
	}
}

// split tells whether enough nodes answered, but not for one and the same.
func (c *count) split() bool { return c.taken() && c.oneHolder() < c.need }

// taken tells whether enough nodes answered, but said no.
func (c *count) taken() bool { return (c.yes | c.held).len() >= c.need }

// own tells whether a node had the token before.
func (c *count) own() bool {
	for i, a := range c.answers {
		if c.yes.has(i) && a.reply.Own {
			return true
		}
	}
	return false
}

// oneHolder returns at how many nodes the most successful other holds the lock, as far as they tell.
func (c *count) oneHolder() (most int) {
	holders := map[string]int{}
	for i, a := range c.answers {
		if c.held.has(i) { // those that nobody has named count as one
			holders[a.reply.Holder]++
			most = max(most, holders[a.reply.Holder])
		}
	}
	return most
}

// loss is the error of a failed vote about a lease: lost if a quorum can't hold the token, else unknown or what the nodes
// say.
func (c *count) loss(ctx context.Context) error {
	switch {
	case c.lost.len() >= c.need:
		return c.wrap(lock.ErrLost)
	case !c.done() || c.unknown != 0 || c.yes != 0: // some nodes have done it, or may have
		return c.undecided(ctx)
	default:
		return c.noQuorum()
	}
}

// holder returns who holds the lock at all nodes that refused it; empty if they are several, or not known.
func (c *count) holder() (name string) {
	for i, a := range c.answers {
		switch {
		case !c.held.has(i):
		case a.reply.Holder == "" || name != "" && name != a.reply.Holder:
			return ""
		default:
			name = a.reply.Holder
		}
	}
	return name
}

// remaining is when the vote may be won: when as many leases have ended as the quorum lacks. Zero if it is not known.
func (c *count) remaining() time.Duration {
	var ends []time.Duration
	for i, a := range c.answers {
		if c.held.has(i) && a.reply.Remaining > 0 {
			ends = append(ends, a.reply.Remaining)
		}
	}
	lacking := c.need - c.yes.len()
	if lacking > len(ends) {
		return 0
	}
	slices.Sort(ends)
	return ends[lacking-1]
}

// highest returns the highest fence, and how many nodes have given just that.
func (c *count) highest() (f lock.Fence, agree int) {
	for i, a := range c.answers {
		switch {
		case !c.yes.has(i) || a.reply.Fence < f:
		case a.reply.Fence > f:
			f, agree = a.reply.Fence, 1
		default:
			agree++
		}
	}
	return f, agree
}

// listeners returns the most that a node has counted, or -1 if one does not tell.
func (c *count) listeners() int {
	most := 0
	for i, a := range c.answers {
		if c.yes.has(i) {
			if a.reply.Listeners < 0 {
				return -1
			}
			most = max(most, a.reply.Listeners)
		}
	}
	return most
}
