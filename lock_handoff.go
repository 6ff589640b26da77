package lock

import (
	"context"
	"errors"
	"time"

	"github.com/seed-b640e7e9/lock/internal/call"
)

// run is a row of grants under one lease, for which Redis need not be asked. It is bounded, as others may wait: after
// so many grants or so long a time there is a true release.
type run struct {
	began      time.Time
	next, last Fence     // reserved: from next to last
	grants     int32     // passed on so far
	limit      int32     // how many may be
	block      int32     // how many grants to prepare for with the next prolongation
	stood      int32     // how often in a row others were let go first in vain, before
	notBefore  time.Time // when the next prolongation may be, after one has failed
	asking     bool      // one is under way
	heard      bool      // others listen, or it is not known
}

const (
	runTime  = time.Second
	maxBlock = 1024
	maxStood = 6 // from then on the pause does not grow
)

// nextBlock is how many grants a lease after this one may have in a row, if nobody else listens.
func (l *lease) nextBlock() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return int(l.run.block)
}

// kind is what a lease and a waiter must have in common for the lease to be passed on.
type kind struct {
	ttl      time.Duration
	handoffs int32 // the most in a run while others listen
	fence    FenceMode
}

// pass ends the grant and begins another, of the given kind, under the same lease; nil if the lease has to be released
// instead. The caller has to end the context. It does not take the lease's end into account but by the clock: it is
// called with the room locked.
func (g *grant) pass(to kind) *grant {
	l := g.lease
	l.mu.Lock()
	defer l.mu.Unlock()
	r, at := &l.run, time.Now()
	switch {
	case g.ended != nil, l.extended, to != l.kind, at.Add(l.kind.ttl / 3).After(l.deadline):
		return nil
	case r.grants >= r.limit, at.Sub(r.began) >= runTime, l.kind.fence != FenceOff && r.next > r.last:
		return nil
	}
	next := &grant{lease: l}
	if l.kind.fence != FenceOff {
		next.fence = r.next
		r.next++
	}
	r.grants++
	if l.lastLocked() { // the next is not bound by this one's WithMaxHold
		l.planLocked(l.renewAt(l.confirmed))
	}
	g.endLocked(ErrReleased)
	l.holder = next
	return next
}

// anticipate prepares for more grants, in the background, if few are left that the lease could be passed on to.
func (l *lease) anticipate() {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := &l.run
	few, fences := r.block/2, int32(r.last-r.next)+1
	short := l.kind.fence != FenceOff && fences <= min(few, r.limit-r.grants-1)
	if !r.heard && r.limit-r.grants <= few {
		short = true
	}
	if !short || r.asking || time.Now().Before(r.notBefore) || l.kind.handoffs == 0 || l.ended != nil || l.extended || l.lastLocked() {
		return
	}
	r.asking = true
	ask := l.request()
	ask.Count, ask.Floor, ask.Live = int(r.block), r.last, l.live
	ask.TTL = l.ttlLocked(time.Now())
	l.reachLocked(time.Now(), ask.TTL)
	l.dog.count(1)
	go l.prolong(ask)
}

// prolong raises the TTL for the grants to come, reserves their fences, and asks who else listens. A failure means
// fewer grants, and says nothing of the lease: that is what renewals are for.
func (l *lease) prolong(ask Request) {
	defer l.dog.count(-1)
	sent := now()
	ctx, cancel := context.WithDeadline(context.Background(), sent.time.Add(ask.TTL))
	defer cancel()
	l.dog.store.Renew(ctx, []Request{ask}, func(_ int, reply Reply, err error) {
		if err == nil || errors.Is(err, ErrLost) {
			l.renewed(sent, ask.TTL, err)
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		l.run.asking = false
		if err == nil {
			l.run.prepared(ask, reply)
		} else {
			l.run.notBefore = time.Now().Add(l.kind.ttl / 6)
		}
	})
}

func (r *run) prepared(ask Request, reply Reply) {
	if first := reply.Fence - Fence(ask.Count) + 1; first > r.last {
		r.next, r.last = first, reply.Fence
	}
	r.heard = reply.Listeners != 0
	if !r.heard {
		r.limit = max(r.limit, r.grants+int32(ask.Count))
		r.block = min(2*r.block, maxBlock)
	}
}

// passOn gives the grant's lease to the next in line, if it is one that it may be given to. Nothing is sent.
func (c *core) passOn(g *grant) bool {
	l := g.lease
	if l.apart || c.room.Waiting(l.key.Lock) == 0 || g.check() != nil {
		return false
	}
	var next *grant
	w := c.room.Next(l.key.Lock, func(to kind) bool {
		next = g.pass(to)
		return next != nil
	})
	if w == nil {
		return false
	}
	if g.cancel != nil {
		g.cancel(ErrReleased) // before the next can know
	}
	w.Give(turn{grant: next, lease: l})
	l.anticipate()
	return true
}

// drop gives up a grant that nobody can use any more, in the background if that takes a command.
func (c *core) drop(g *grant) {
	if c.passOn(g) {
		return
	}
	c.dog.count(1)
	if err := g.finish(); err != nil {
		if err != errGone {
			c.end(g.lease, time.Time{})
		}
		c.dog.count(-1)
		return
	}
	go func() {
		defer c.dog.count(-1)
		ctx, cancel := context.WithTimeout(context.Background(), call.Limit)
		defer cancel()
		began := time.Now()
		reply, err := c.store.Release(ctx, c.ending(g.lease, time.Time{}))
		if err != nil {
			reply.Listeners = -1
			c.end(g.lease, time.Time{})
		}
		c.vacate(g.lease, reply, time.Since(began))
	}()
}

// vacate gives up the turn that goes with a lease, after a release that took so long. If others listen they get the
// time to take the lock: the waiters and newcomers of this process would always be faster. They listen meanwhile, so
// that they know when the lock is free before that time is over.
func (c *core) vacate(l *lease, r Reply, took time.Duration) {
	if l.apart {
		return
	}
	var t turn
	if r.Listeners == 0 {
		t.block = l.nextBlock()
		c.room.Pass(l.key.Lock, t)
		return
	}
	t.stood = min(int(l.run.stood)+1, maxStood)
	pause := min(max(4*took, minStandBack)<<l.run.stood, maxStandBack)
	t.after = time.Now().Add(pause)
	if forget := c.room.Keep(l.key.Lock, t); forget != nil {
		time.AfterFunc(pause, forget)
	}
}
