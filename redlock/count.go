package redlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/seed-b640e7e9/lock"
)

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

// poor tells whether slow nodes are not worth waiting for: the vote is lost, so that they could only tell why, or it is split
// with others, and keeping the own votes from them helps nobody.
func (c *count) poor() bool { return c.hopeless() || c.held != 0 && c.yes != 0 }

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
