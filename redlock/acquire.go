package redlock

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/internal/wait"
)

const (
	// Votes that were split are repeated after a pause within a time that doubles, from that of some round trips.
	minSpread = time.Millisecond
	maxSpread = 32 * time.Millisecond
	maxSplit  = time.Second // how long, at most

	// One who has votes for longer than that is no contender, but holds the lock, also where too few nodes can tell.
	steady = 2 * grace
)

// Acquire holds a vote. If it is split, as several hold one at the same time, all give back what they have and vote
// again after a random while, so that one of them gets the lock even if each makes one attempt. Each vote has a token of
// its own, which is used for no other: so those who have votes again and again under one token hold the lock.
func (q *quorum) Acquire(ctx context.Context, r lock.Request) (lock.Reply, error) {
	r.Limit = patience(r.TTL)
	end := time.Now().Add(min(r.TTL/4, maxSplit))
	token := r.Token
	var since time.Time // when the holder was first seen
	holder := ""
	for spread := minSpread; ; spread = min(2*spread, maxSpread) {
		reply, again, err := q.take(ctx, r)
		if err == nil {
			if r.Token != token {
				reply.Token = r.Token
			}
			return reply, nil
		}
		reply.Spent = true
		if now := time.Now(); reply.Holder != holder {
			holder, since = reply.Holder, now
		} else if holder != "" && again && now.Sub(since) > steady {
			return reply, fmt.Errorf("%w: %w", lock.ErrHeld, nodeErrors(NodeErrors(err)))
		}
		if !again || r.Again && !time.Now().Before(end) || !wait.Sleep(ctx, rand.N(spread)) {
			return reply, err
		}
		r.Token, r.Again, r.Used = uuid.NewString(), true, false
	}
}

// take is one vote. If it fails, it tells whether another is of use: who has the lock is known only after a vote that
// asks for it.
func (q *quorum) take(ctx context.Context, r lock.Request) (reply lock.Reply, again bool, err error) {
	q.taking(r.Token, q.all)
	v := q.ask(ctx, taking, r, q.all)
	defer v.free()
	v.wait(ctx)
	if v.won() {
		if reply, err = q.grant(ctx, v); err == nil {
			return reply, false, nil
		}
	} else {
		err, again = v.refusal(ctx), v.split() || !r.Again && v.taken()
		reply = lock.Reply{Remaining: v.remaining(), Holder: v.holder()}
	}
	maybe := v.yes | v.unknown | v.open
	if r.Used {
		maybe = q.all
	}
	q.giveBack(ctx, r, v, maybe, again)
	return reply, again, err
}

// grant makes the counters of a quorum agree on the fence, on nodes that hold the token: without that condition a slow
// command of an older grant could come after a newer one, and one number be given twice. Often they agree already.
func (q *quorum) grant(ctx context.Context, v *vote) (lock.Reply, error) {
	reply := lock.Reply{Own: v.own()}
	if v.req.Fence == lock.FenceOff {
		return reply, nil
	}
	f, failed := q.agree(ctx, v)
	switch {
	case failed == nil:
		reply.Fence = f
		return reply, nil
	case !failed.done() && ctx.Err() != nil:
		return reply, failed.undecided(ctx)
	default:
		return reply, fmt.Errorf("the fence was not written back: %w", failed.noQuorum())
	}
}

// agree returns the highest fence of a vote that is won, when a quorum that holds the token has it; else the count of those
// that were to.
func (q *quorum) agree(ctx context.Context, v *vote) (f lock.Fence, failed *count) {
	f, same := v.highest()
	if same >= q.need {
		return f, nil
	}
	r := v.req
	r.Count, r.Floor = 0, f
	back := q.ask(ctx, renewing, r, v.yes|v.open)
	defer back.free()
	back.wait(ctx)
	if !back.won() {
		c := back.count
		c.answers = slices.Clone(c.answers)
		return 0, &c
	}
	return f, nil
}

// giveBack releases, in the background, what a failed vote has taken or may have taken. Who is to vote again waits for
// that, so as not to be in its own way.
func (q *quorum) giveBack(ctx context.Context, r lock.Request, v *vote, maybe set, await bool) {
	if maybe == 0 {
		return
	}
	back := q.release(ctx, lock.Request{Key: r.Key, Token: r.Token, TTL: r.TTL, Limit: r.Limit, Quiet: ctx.Err() == nil}, maybe, v.yes.len())
	defer back.free()
	if await && v.yes != 0 {
		back.wait(ctx)
	} else {
		back.leave()
	}
}
