package lock

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/seed-b640e7e9/lock/internal/call"
	"github.com/seed-b640e7e9/lock/internal/keys"
	"github.com/seed-b640e7e9/lock/internal/sweep"
)

// take is Acquire and TryAcquire; with follow, the lock's context ends with ctx.
func (l *Locker) take(ctx context.Context, name string, try, follow bool) (*Lock, error) {
	a, err := l.prepare(ctx, name)
	if err != nil {
		return nil, &Error{Op: "acquire", Name: name, Err: err}
	}
	waiting := ctx
	if l.opts.maxWait > 0 {
		var cancel context.CancelFunc
		waiting, cancel = context.WithTimeout(ctx, l.opts.maxWait)
		defer cancel()
	}
	l.core.dog.count(1)
	var lk *Lock
	defer func() {
		if lk == nil { // else it is the lease's from now on
			l.core.dog.count(-1)
		}
	}()
	if lk, err = l.queue(ctx, waiting, &a, name, try, follow); err != nil {
		return nil, &Error{Op: "acquire", Name: name, Err: a.ended(ctx, waiting, err)}
	}
	return lk, nil
}

// turn is what the waiting room passes from one to the next: a lease that goes on, or the right to contend for one.
type turn struct {
	grant *grant      // of a lease that is passed on
	rest  *contention // what the one before has left, if it has contended in vain
	lease *lease      // the lease that is held, for those who wait to see
	last  error       // what the last try said
	block int         // how many grants the next lease may have in a row, if that is known to be more than usual
	after time.Time   // when to try, as others are to have the lock first; zero: at once
	stood int         // how often in a row that was so, although none of them came
}

// queue waits for the caller's turn in the process and then, unless it comes with a lease, contends for one.
func (l *Locker) queue(ctx, waiting context.Context, a *attempt, name string, try, follow bool) (*Lock, error) {
	room, key := l.core.room, a.req.Key.Lock
	if try {
		shown, free := room.TryEnter(key)
		if free {
			return l.compete(ctx, waiting, a, name, turn{}, try, follow)
		}
		if shown.lease != nil && shown.lease.held() {
			return nil, ErrHeld
		}
		return l.apart(ctx, a, name, follow)
	}
	for {
		w, t := room.Enter(key, l.kind())
		if w != nil {
			if t.lease != nil {
				t.lease.anticipate()
			}
			var mine bool
			if t, mine = w.Wait(waiting); !mine {
				return nil, t.said(waiting)
			}
		}
		if t.grant == nil && waiting.Err() == nil {
			return l.compete(ctx, waiting, a, name, t, try, follow)
		}
		if t.grant == nil {
			l.core.leave(key, t)
			return nil, t.said(waiting)
		}
		if waiting.Err() == nil && t.grant.lasting() {
			l.core.dog.count(-1) // the lease is counted already
			return l.lock(ctx, name, t.grant, follow), nil
		}
		l.core.drop(t.grant)
		if waiting.Err() != nil {
			return nil, t.said(waiting)
		}
	}
}

// said is the error of one who has left the line: what is known from those who had the turn.
func (t turn) said(ctx context.Context) error {
	switch {
	case t.lease != nil:
		return ErrHeld
	case t.last != nil:
		return t.last
	default:
		return call.ContextError(ctx)
	}
}

// compete contends for the lock. The turn is the caller's, and is passed on in the end, or shows the lease.
func (l *Locker) compete(ctx, waiting context.Context, a *attempt, name string, t turn, try, follow bool) (*Lock, error) {
	key := a.req.Key.Lock
	var g granted
	var err error
	passed := false
	defer func() {
		if !passed { // a Store or a hook has panicked, or there is no lock
			t.after, t.block, t.stood = time.Time{}, 0, 0
			l.core.leave(key, t)
		}
	}()
	a.block, a.stood = t.block, t.stood
	if t.rest == nil && !t.after.IsZero() && !try {
		t.rest = newContention(*a)
		t.rest.next, t.rest.last = t.after, t.last
	}
	if c := t.rest; c == nil {
		var remaining time.Duration
		if g, remaining, err = l.once(waiting, a); err != nil {
			c = newContention(*a)
			g, err = l.contend(waiting, c, try, remaining, err)
			*a = c.attempt
			t.rest = c
		}
	} else {
		l.adopt(c, a)
		c.block, c.stood = t.block, t.stood
		g, err = l.contend(waiting, c, try, 0, nil)
		*a = c.attempt
	}
	if err != nil {
		t.last = err
		return nil, err
	}
	if t.rest != nil {
		t.rest.silence()
	}
	le := l.lease(name, a, g)
	l.core.room.Show(key, turn{lease: le})
	passed = true // when the lease ends, if that is before Release
	le.begin()
	lk := l.lock(ctx, name, &le.first, follow)
	if l.core.room.Waiting(key) > 0 {
		le.anticipate()
	}
	return lk, nil
}

// leave passes the turn on, or ends it.
func (c *core) leave(key string, t turn) {
	if !c.room.Pass(key, t) && t.rest != nil {
		t.rest.close(c)
	}
}

// apart makes the one attempt of TryAcquire while others of the process wait. The room knows nothing of it: to those in
// line it is another process.
func (l *Locker) apart(ctx context.Context, a *attempt, name string, follow bool) (*Lock, error) {
	c := newContention(*a)
	c.apart = true
	g, remaining, err := l.once(ctx, &c.attempt)
	if err != nil {
		g, err = l.contend(ctx, c, true, remaining, err)
	}
	*a = c.attempt
	if err != nil {
		c.close(l.core)
		return nil, err
	}
	le := l.lease(name, a, g)
	le.apart = true
	le.begin()
	return l.lock(ctx, name, &le.first, follow), nil
}

func (l *Locker) kind() kind { return kind{l.opts.ttl, int32(l.opts.handoffs), l.opts.fence} }

// attempt is what is sent for a name: one token, as often as needed. It belongs to the turn: who gives up leaves it to
// the next. Once a delete was sent for the token it is never used again.
type attempt struct {
	req     Request
	block   int // how many grants the lease may have in a row; 0: as usual
	stood   int // how often in a row others were let go first in vain
	strays  strays
	last    error // what the last try said
	before  error // and the one before
	unknown error // what the last try of unknown outcome said
}

// prepare makes the attempt, unless it is clear without asking that it can't succeed.
func (l *Locker) prepare(ctx context.Context, name string) (attempt, error) {
	if name == "" {
		return attempt{}, errors.New("empty name")
	}
	if ctx.Err() != nil {
		return attempt{}, call.ContextError(ctx)
	}
	key := Key{Lock: keys.Lock(l.opts.prefix, name)}
	if l.holds(ctx, key.Lock) {
		return attempt{}, ErrReentrant
	}
	if l.opts.fence != FenceOff {
		key.Fence = keys.Fence(l.opts.prefix, name)
	}
	return attempt{req: Request{Key: key, TTL: l.opts.ttl, Fence: l.opts.fence}}, nil
}

// newToken returns a random UUID. It is filled in place, which spares the allocation of uuid.NewRandom.
func newToken() string {
	var id uuid.UUID
	rand.Read(id[:])          // never fails
	id[6] = id[6]&0x0f | 0x40 // version 4
	id[8] = id[8]&0x3f | 0x80 // variant of RFC 9562
	return id.String()
}

// holds tells whether ctx comes from a holder of the key, who would wait for itself.
func (l *Locker) holds(ctx context.Context, key string) bool {
	for lk, ok := FromContext(ctx); ok; lk, ok = lk.outer() {
		g := lk.grant
		if sameKeys(lk.core.store, l.core.store) && g.lease.key.Lock == key && g.check() == nil {
			return true
		}
	}
	return false
}

// granted is the success of an attempt.
type granted struct {
	sent     moment // when the command was sent that took the lease
	fence    Fence  // the last that is the lease's
	reserved Fence  // how many of them are for later grants
}

// errLate is a grant with too little left of it. Another try finds the token and raises its TTL again.
var errLate = fmt.Errorf("%w: granted too late to be of use", ErrUnknown)

// once makes one try. A grant that nobody can use, as ctx has ended or a quarter of the TTL or less is left, becomes a
// stray.
func (l *Locker) once(ctx context.Context, a *attempt) (granted, time.Duration, error) {
	a.req.Count = 0
	if a.req.Fence != FenceOff && l.opts.handoffs > 0 && l.core.room.Waiting(a.req.Key.Lock) > 0 {
		a.req.Count = max(l.opts.handoffs, a.block)
	}
	if a.req.Token == "" { // who is passed a lease needs none
		a.req.Token = newToken()
	}
	sent := now()
	reply, err := l.core.store.Acquire(ctx, a.req)
	a.req.Again, a.req.Used = true, true
	switch {
	case err != nil && reply.Spent:
		a.req.Token, a.req.Used, a.strays = newToken(), false, strays{}
	case errors.Is(err, ErrUnknown):
		a.unknown = err
		a.strays.add(sent)
	}
	if err != nil {
		return granted{}, reply.Remaining, err
	}
	if reply.Token != "" {
		a.req.Token, a.strays = reply.Token, strays{}
	}
	if reply.Own && a.strays.n > 0 {
		a.strays.n--
	}
	if ctx.Err() != nil {
		a.strays.add(sent)
		return granted{}, 0, call.ContextError(ctx)
	}
	if time.Until(sent.time.Add(a.req.TTL-drift(a.req.TTL))) <= a.req.TTL/4 {
		a.strays.add(sent)
		a.unknown = errLate
		return granted{}, 0, errLate
	}
	g := granted{sent: sent, fence: reply.Fence}
	if !reply.Own {
		g.reserved = Fence(a.req.Count)
	}
	return g, 0, nil
}

// ended adds to the last error why the waiting has ended, if a context did that: the caller's, or that of WithMaxWait,
// which the caller never sees. Where it cut a command off, that says nothing of Redis, so what went wrong before is
// added; but not that another held the lock, as that may have changed.
func (a *attempt) ended(ctx, waiting context.Context, err error) error {
	if a.strays.n > 0 && a.unknown != nil && !errors.Is(err, ErrHeld) && !errors.Is(err, ErrUnknown) {
		err = fmt.Errorf("%w; before: %w", err, a.unknown) // and that try may have taken the lock
	}
	if waiting.Err() == nil {
		return err
	}
	cut := errors.Is(err, waiting.Err())
	switch {
	case ctx.Err() != nil:
		err = withContext(ctx, err)
	case cut && errors.Is(err, ErrUnknown):
		err = fmt.Errorf("%w: no answer within the time of WithMaxWait", ErrUnknown)
	case cut:
		err = errors.New("no attempt got through within the time of WithMaxWait")
	}
	if cut && a.before != nil && !errors.Is(a.before, ErrHeld) {
		err = fmt.Errorf("%w; before: %w", err, a.before)
	}
	return err
}

// withContext adds ctx's error to err if ctx has ended and err does not say so.
func withContext(ctx context.Context, err error) error {
	if ctx.Err() == nil || errors.Is(err, ctx.Err()) {
		return err
	}
	return fmt.Errorf("%w: %w", err, call.ContextError(ctx))
}

// lease makes the lease of a granted attempt, which is not under watch yet.
func (l *Locker) lease(name string, a *attempt, g granted) *lease {
	le := &lease{
		dog: l.core.dog, name: name, key: a.req.Key, token: a.req.Token, kind: l.kind(), strays: a.strays, confirmed: g.sent.time,
	}
	le.deadline, le.suspended = g.sent.time.Add(le.kind.ttl-drift(le.kind.ttl)), g.sent.suspended
	le.reach = time.Now().Add(le.kind.ttl)
	le.renew.Value, le.alarm.Value = le, le
	block := l.opts.handoffs
	if block > 0 {
		block = max(block, a.block)
	}
	le.first = grant{lease: le, fence: g.fence - g.reserved}
	le.holder = &le.first
	le.run = run{
		began: g.sent.time, limit: int32(block), block: int32(block), stood: int32(a.stood),
		next: g.fence - g.reserved + 1, last: g.fence,
	}
	return le
}

// lock makes the Lock of a grant.
func (l *Locker) lock(ctx context.Context, name string, g *grant, follow bool) *Lock {
	lk := &Lock{core: l.core, grant: g, name: name}
	if l.opts.minHold > 0 {
		lk.keep = time.Now().Add(l.opts.minHold)
	}
	lk.ctx.lock = lk
	parent := ctx
	if !follow {
		parent, lk.ctx.values = context.Background(), ctx
	}
	var cancel context.CancelCauseFunc
	lk.ctx.Context, cancel = context.WithCancelCause(parent)
	g.attach(lk, cancel, &l.opts)
	return lk
}

// sweepStrays deletes, in the background, what sends of unknown outcome may have left or may leave yet.
func (c *core) sweepStrays(r Request, s strays) {
	if s.n > 0 && time.Since(s.last) < r.TTL {
		c.sweep(r, s)
	}
}

func (c *core) sweep(r Request, s strays) {
	c.sweeper.Add(sweep.Task{Until: s.last.Add(r.TTL), Do: func(ctx context.Context) bool {
		_, err := c.store.Release(ctx, Request{Key: r.Key, Token: r.Token, TTL: r.TTL})
		if err == nil {
			s.n--
		}
		return s.n == 0 || IsPermanent(err)
	}})
}
