// Package lock is a distributed lock on Redis: of all processes that share a Redis, one at a time runs a critical
// section.
//
//	locker := lock.New(rdb)
//	err := locker.Do(ctx, "account:42", func(ctx context.Context) error {
//		return transfer(ctx)
//	})
//
// [New] makes a [Locker] on a go-redis client. [Locker.Do] waits for a lock, runs a function under it and releases it;
// [Locker.TryDo] does not wait. [Locker.Acquire] and [Locker.TryAcquire] return a [Lock] that outlives the call. The
// package-level [Do] and [TryDo] use the Locker given to [SetDefault]. [WithFencing] adds a [Fence].
//
// # Protocol
//
// A lease is a key with a random token and a TTL. It is taken by SET NX PX; renewed by a script that compares the
// token and raises the TTL, three times in a TTL; and ended by a script that compares the token and deletes the key. No
// command for a live token ever lowers its TTL, and a token that a delete was sent for is never used again.
//
// The holder trusts its lease up to a deadline,
//
//	sent + TTL - drift
//
// where sent is the instant before the last confirmed command that set the TTL was sent, on the monotonic clock, and
// drift is 1 % of the TTL and 2 ms. At the deadline the context of the lock is cancelled with a cause that matches
// [ErrLost]. A timer does that: no answer, no connection and no running goroutine is needed.
//
//	free ── granted ──> held ── Release ──────────────────────────────> released
//	                     │  ↺ renewed                                     (ErrReleased)
//	                     └── deadline, or the key is gone or another's ──> lost
//	                                                                      (ErrLost)
//
// # Promise
//
// At most one holder of a name is valid at a time, where a holder is valid only before its deadline, as long as
//
//   - one Redis primary serves the key for the whole lease: no failover to a replica that had not heard of it, no
//     FLUSHALL, no eviction, no restart that loses data;
//   - the clock of the server gains no more than the drift on the client's within a lease. A clock that jumps forward
//     breaks this.
//
// And the holder hears of a loss before anyone else can get in. Hearing is not stopping: a process that is paused between
// its last check and its effect acts too late, under any lock. Where that matters let the protected resource check a
// [Fence].
//
// # Outcomes
//
// A command without an answer may have had its effect, or have it later. This is reported as [ErrUnknown], and never as
// [ErrHeld], [ErrLost] or success. What an acquire of unknown outcome may leave behind is deleted in the background, by
// its token, for at most one TTL; [Locker.Wait] waits for that.
//
// Contexts are obeyed although go-redis does not do that by itself: at once while waiting, and within 20 ms while a
// command is in flight; but on a client with ContextTimeoutEnabled a cancellation within one second (deadlines are exact
// there). The recommended client has ContextTimeoutEnabled: a command then needs no goroutine of its own.
//
// # What a server must allow
//
// SET, GET, PTTL, PEXPIRE, DEL, EVALSHA and EVAL on the lock keys, and with fencing INCR, GET, SET and, for
// [WithClockFencing], TIME on the fence keys. Nothing else is sent. A name N with prefix P is at the key P+"lock:"+N,
// where redis-py and most locks written by hand have it too. Its fence counter is in the same cluster slot, at a key
// that begins with P+"fence:".
package lock

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/seed-b640e7e9/lock/internal/call"
	"github.com/seed-b640e7e9/lock/internal/keys"
	"github.com/seed-b640e7e9/lock/internal/sweep"
	"github.com/seed-b640e7e9/lock/internal/wait"
)

const (
	defaultTTL = 10 * time.Second
	minTTL     = 10 * time.Millisecond
	maxTTL     = 10 * 365 * 24 * time.Hour // more than any lease means, and far from where durations overflow

	// releaseBudget is the time that Release and Extend give to a Redis that fails, before they try once more at most;
	// and it is all that Release takes when its context has ended before.
	releaseBudget = time.Second

	sweeps = 8 // clean-ups under way at a time

	// A release that others listen to is followed by a pause of four times as long as it took, within these bounds,
	// before anyone of the process tries again.
	minStandBack = 2 * time.Millisecond
	maxStandBack = 100 * time.Millisecond

	defaultHandoffs = 16
	maxHandoffs     = 1024
)

// A Locker takes locks. It is made by New, and safe for concurrent use; a process needs one for each Redis. It runs
// nothing while no lock is held, so there is nothing to close.
type Locker struct {
	core *core
	opts options
}

// core is what a Locker shares with its variants.
type core struct {
	store   Store
	dog     *watchdog
	room    *wait.Room[kind, turn]
	sweeper *sweep.Sweeper
	deaf    atomic.Bool // it has been said that waiters are not woken
	mute    atomic.Bool // it has been said that they are not told
}

// New returns a Locker on one Redis: a single server, the primary that Sentinel names, or a Cluster. It does no I/O.
//
// The client should have ContextTimeoutEnabled set, which makes go-redis obey deadlines by itself: then each command
// runs in the caller's goroutine. Without it a command whose context can end costs a goroutine more.
//
// New panics if rdb can't carry a lock (nil, a redis.Ring, a redis.AutoPipeliner) or if an option is invalid.
func New(rdb redis.UniversalClient, opts ...Option) *Locker {
	return NewWithStore(NewStore(rdb), opts...)
}

// NewWithStore returns a Locker on a Store. It is experimental until v1. Lockers on equal Stores are taken to
// share their keys. It panics if s is nil or not comparable, or if an option is invalid.
func NewWithStore(s Store, opts ...Option) *Locker {
	if s == nil {
		panic("lock: nil Store")
	}
	if !reflect.ValueOf(s).Comparable() {
		panic("lock: a Store must be comparable; use a pointer")
	}
	room := new(wait.Room[kind, turn])
	c := &core{store: s, dog: newWatchdog(s, room), room: room, sweeper: sweep.New(sweeps, call.Limit)}
	l := &Locker{core: c, opts: options{ttl: defaultTTL, handoffs: defaultHandoffs}}
	return l.With(opts...)
}

// With returns a variant of l with other options. The two share the watchdog and the waiting room, and exclude each other
// as any two Lockers on one Redis do. With panics if an option is invalid.
func (l *Locker) With(opts ...Option) *Locker {
	v := &Locker{core: l.core, opts: l.opts}
	for _, opt := range opts {
		opt(&v.opts)
	}
	if err := v.opts.check(); err != nil {
		panic("lock: " + err.Error())
	}
	return v
}

// Do waits for the lock, runs fn while holding it, and releases it when fn has returned, panicked or called
// runtime.Goexit. The lock is renewed until then, even if ctx has ended and fn does not listen.
//
// The context of fn has the values and the deadline of ctx, and ends with it. It ends too when the lock is lost, with a
// cause that matches ErrLost, before anyone else can get in: fn should then stop at once.
//
// Do returns fn's error. If the section may not have been exclusive up to fn's return, the error matches ErrLost too:
// test for that first. A release that fails is logged, not returned: fn's work was exclusive, and the lease ends by
// itself. If fn did not run, the error is one of Acquire's.
func (l *Locker) Do(ctx context.Context, name string, fn func(ctx context.Context) error) error {
	return l.do(ctx, name, fn, false)
}

// TryDo is Do, but does not wait: if another holds the lock it returns an error that matches ErrHeld at once. An fn
// that takes other locks should not return their ErrHeld as it is, if the caller is to tell the two apart.
func (l *Locker) TryDo(ctx context.Context, name string, fn func(ctx context.Context) error) error {
	return l.do(ctx, name, fn, true)
}

func (l *Locker) do(ctx context.Context, name string, fn func(context.Context) error, try bool) (err error) {
	if fn == nil {
		return &Error{Op: "do", Name: name, Err: errors.New("nil function")}
	}
	lk, err := l.take(ctx, name, try, true)
	if err != nil {
		return err
	}
	defer func() { err = lk.conclude(ctx, err) }()
	return fn(&lk.ctx)
}

// conclude releases the lock after fn has ended with err, and returns what Do does.
func (lk *Lock) conclude(ctx context.Context, err error) error {
	released := lk.Release(ctx)
	switch {
	case released == nil:
		return err
	case !errors.Is(released, ErrLost):
		orDefault(lk.grant.logger).Warn("lock: release failed; the lease ends by itself", "name", lk.name, "error", released)
		return err
	}
	var e *Error
	if errors.As(released, &e) {
		released = &Error{Op: "do", Name: lk.name, Err: e.Err}
	}
	switch {
	case err == nil:
		return released
	case errors.Is(err, context.Cause(&lk.ctx)):
		return err // fn has said it
	default:
		return fmt.Errorf("%w; the function: %w", released, err)
	}
}

// Acquire waits until it holds the lock, or ctx or WithMaxWait ends the waiting. The lock is renewed until it is
// released: the end of ctx does not end it. Use Do where you can; use Acquire where a lock has to outlive a function.
//
// The error is an *Error. It matches ErrHeld if another held the lock up to the end, and ctx's error if that was the
// end; ErrUnknown if the last command got no answer; ErrReentrant at once if ctx comes from a holder of the lock.
// Otherwise it carries the client's error: Redis could not be reached, or refused. What time may heal is tried again,
// with growing pauses, for as long as ctx and WithMaxWait let it; what it does not heal, such as missing permissions,
// is returned at once.
func (l *Locker) Acquire(ctx context.Context, name string) (*Lock, error) {
	return l.take(ctx, name, false, false)
}

// TryAcquire is Acquire, but makes one attempt: if another holds the lock, its error matches ErrHeld. An attempt whose
// outcome is unknown is asked about once more.
func (l *Locker) TryAcquire(ctx context.Context, name string) (*Lock, error) {
	return l.take(ctx, name, true, false)
}

// Wait returns nil when no lease of l and its variants is held, nobody waits for one, and no clean-up and no subscription
// is left, or ctx's error. Call it before the process exits, so that deletes in the background are not cut off; and at
// the end of tests.
func (l *Locker) Wait(ctx context.Context) error {
	if err := l.core.dog.wait(ctx); err != nil {
		return err
	}
	if err := l.core.sweeper.Wait(ctx); err != nil {
		return err
	}
	return l.core.store.Wait(ctx)
}

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
	lk, err := l.queue(ctx, waiting, &a, name, try, follow)
	if err != nil {
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
	block int         // for how many grants to prepare
	after time.Time   // when to try, as others are to have the lock first; zero: at once
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
		g, err = l.contend(waiting, c, try, 0, nil)
		*a = c.attempt
	}
	if err != nil {
		t.last, t.after = err, time.Time{}
		l.core.leave(key, t)
		return nil, err
	}
	if t.rest != nil {
		t.rest.silence()
	}
	le := l.lease(name, a, g)
	le.run.block = max(le.run.block, t.block)
	le.begin(g.sent)
	lk := l.lock(ctx, name, &le.first, follow)
	l.core.room.Show(key, turn{lease: le})
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
	c := &contention{attempt: *a}
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
	le.begin(g.sent)
	return l.lock(ctx, name, &le.first, follow), nil
}

func (l *Locker) kind() kind { return kind{l.opts.ttl, l.opts.fence, l.opts.handoffs} }

// attempt is what is sent for a name: one token, as often as needed. It belongs to the turn: who gives up leaves it to
// the next. Once a delete was sent for the token it is never used again.
type attempt struct {
	req     Request
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
	return attempt{req: Request{Key: key, Token: newToken(), TTL: l.opts.ttl, Fence: l.opts.fence}}, nil
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
		if sameKeys(lk.core.store, l.core.store) && g.lease.req.Key.Lock == key && g.check() == nil {
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

// contention is what one has who contends for a lock that was not free at once. It is passed on with the turn.
type contention struct {
	attempt
	pause wait.Pause
	next  time.Time     // when to try again
	heard chan struct{} // gets a value when there is reason to try before
	stop  func()        // ends listening; nil while nobody listens
}

func newContention(a attempt) *contention {
	return &contention{attempt: a, heard: make(chan struct{}, 1)}
}

// wake is called when the lock may have become free. It does not block: one reason is enough.
func (c *contention) wake() {
	select {
	case c.heard <- struct{}{}:
	default:
	}
}

// silence ends listening.
func (c *contention) silence() {
	if c.stop != nil {
		c.stop()
		c.stop = nil
	}
}

// close ends what nobody goes on with.
func (c *contention) close(core *core) {
	c.silence()
	core.sweepStrays(c.req, c.strays)
}

// adopt makes the caller go on where another has given up: with the same token, if that is what the caller would have
// asked for.
func (l *Locker) adopt(c *contention, a *attempt) {
	if c.req.TTL != a.req.TTL || c.req.Fence != a.req.Fence {
		l.core.sweepStrays(c.req, c.strays)
		a.last = c.last
		c.attempt = *a
	}
}

// contend goes on, after a try that ended with err or, if that is nil, where another has given up, until the lock is
// granted, ctx ends or trying is of no use. It returns the last error, which may be the other's.
func (l *Locker) contend(ctx context.Context, c *contention, try bool, remaining time.Duration, err error) (granted, error) {
	if err == nil && time.Until(c.next) > 0 {
		l.listen(ctx, c) // there is time for it
	}
	for n := 0; ; n++ {
		if err != nil {
			if c.last != nil && errors.Is(err, ctx.Err()) && !errors.Is(err, ErrUnknown) {
				return granted{}, c.last // nothing was sent after that
			}
			c.last = err
			if isPermanent(err) || ctx.Err() != nil || try && (n > 0 || !errors.Is(err, ErrUnknown)) {
				return granted{}, err
			}
			l.core.room.Show(c.req.Key.Lock, turn{last: err})
			c.next = time.Now().Add(l.pause(ctx, c, try, remaining))
		}
		if !c.sleep(ctx) {
			return granted{}, c.last
		}
		c.before = c.last
		var g granted
		if g, remaining, err = l.once(ctx, &c.attempt); err == nil {
			return g, nil
		}
	}
}

// pause returns how long to sleep after a try. Who finds the lock held begins to listen, and tries again at once: the
// release may have come in between.
func (l *Locker) pause(ctx context.Context, c *contention, try bool, remaining time.Duration) time.Duration {
	switch {
	case try || !errors.Is(c.last, ErrHeld):
		return c.pause.Next(0)
	case c.stop != nil:
		return c.pause.Told(remaining)
	case l.listen(ctx, c):
		return 0
	default:
		return c.pause.Next(remaining)
	}
}

// listen begins to listen, and tells whether it does.
func (l *Locker) listen(ctx context.Context, c *contention) bool {
	if c.stop != nil {
		return true
	}
	stop, err := l.core.store.Listen(ctx, c.req.Key, c.wake)
	if err == nil {
		c.stop = stop
		return true
	}
	if errors.Is(err, errors.ErrUnsupported) && !l.core.deaf.Swap(true) {
		orDefault(l.opts.logger).Warn("lock: waiters are not woken, but ask again a few times a second", "error", err)
	}
	return false
}

// sleep returns when it is time for the next try, or with false when ctx has ended; then that time is left to the next.
func (c *contention) sleep(ctx context.Context) bool {
	d := time.Until(c.next)
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-c.heard:
		c.next = time.Time{}
	case <-t.C:
	case <-ctx.Done():
	}
	return ctx.Err() == nil
}

// errLate is a grant with too little left of it. Another try finds the token and raises its TTL again.
var errLate = fmt.Errorf("%w: granted too late to be of use", ErrUnknown)

// once makes one try. A grant that nobody can use, as ctx has ended or a quarter of the TTL or less is left, becomes a
// stray.
func (l *Locker) once(ctx context.Context, a *attempt) (granted, time.Duration, error) {
	a.req.Count = 0
	if a.req.Fence != FenceOff && l.core.room.Waiting(a.req.Key.Lock) > 0 {
		a.req.Count = l.opts.handoffs
	}
	sent := now()
	reply, err := l.core.store.Acquire(ctx, a.req)
	a.req.Again = true
	if errors.Is(err, ErrUnknown) {
		a.unknown = err
		a.strays.add(sent)
	}
	if err != nil {
		return granted{}, reply.Remaining, err
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
	if a.strays.n > 0 && !errors.Is(err, ErrHeld) && !errors.Is(err, ErrUnknown) {
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

// lease makes the lease of a granted attempt. It is not under watch yet.
func (l *Locker) lease(name string, a *attempt, g granted) *lease {
	le := &lease{dog: l.core.dog, name: name, req: a.req, kind: l.kind(), strays: a.strays}
	le.first = grant{lease: le, fence: g.fence - g.reserved}
	le.holder = &le.first
	le.confirmed = g.sent
	le.run = run{
		began: g.sent.time, limit: l.opts.handoffs, block: l.opts.handoffs,
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

// passOn gives the grant's lease to the next in line, if it is one that it may be given to. Nothing is sent.
func (c *core) passOn(g *grant) bool {
	l := g.lease
	if l.apart || g.check() != nil {
		return false
	}
	var next *grant
	w := c.room.Next(l.req.Key.Lock, func(to kind) bool {
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
	if !c.passOn(g) && g.finish() == nil {
		began := time.Now()
		c.end(g.lease, time.Time{}, func(r Reply) { c.vacate(g.lease, r, time.Since(began)) })
	}
}

// vacate gives up the turn that goes with a lease, after a release that took so long. If others listen they get the
// time to take the lock: the waiters and newcomers of this process would always be faster. They listen meanwhile, so
// that they know when the lock is free before that time is over.
func (c *core) vacate(l *lease, r Reply, took time.Duration) {
	if l.apart {
		return
	}
	t := turn{last: ErrHeld, block: l.nextBlock()}
	if r.Listeners == 0 {
		c.room.Pass(l.req.Key.Lock, t)
		return
	}
	pause := min(max(4*took, minStandBack), maxStandBack)
	t.after = time.Now().Add(pause)
	if forget := c.room.Keep(l.req.Key.Lock, t); forget != nil {
		time.AfterFunc(pause, forget)
	}
}

// sweepStrays deletes, in the background, what sends of unknown outcome may have left or may leave yet.
func (c *core) sweepStrays(r Request, s strays) {
	if s.n > 0 && time.Since(s.last) < r.TTL {
		c.sweep(r, s)
	}
}

func (c *core) sweep(r Request, s strays) {
	c.sweeper.Add(sweep.Task{Until: s.last.Add(r.TTL), Do: func(ctx context.Context) bool {
		_, err := c.store.Release(ctx, Request{Key: r.Key, Token: r.Token})
		if err == nil {
			s.n--
		}
		return s.n == 0 || isPermanent(err)
	}})
}

// A Lock is one grant of a name. It is made by Acquire and TryAcquire, or reached through FromContext, and is safe for
// concurrent use. Most callers need Context, to stop when the lock is lost, and Release. A Lock that is dropped without
// Release is no longer renewed once it has been garbage-collected.
type Lock struct {
	core  *core
	grant *grant
	name  string
	keep  time.Time // a release before it leaves the key until then; zero: none does
	ctx   lockContext

	mu        sync.Mutex    // guards all below, but for what only the goroutine that set releasing touches
	releasing bool          // a Release is under way
	after     chan struct{} // closed when it ends; nil while nobody waits for that
	settled   bool          // the outcome is definite
	outcome   error         // and this is it
	unsure    error         // of a delete of unknown outcome; only the releasing goroutine touches it
	swept     bool          // it goes on in the background; the same
}

// Name returns the name that is locked.
func (lk *Lock) Name() string { return lk.name }

// Fence returns the fencing token of this grant, or zero without WithFencing or WithClockFencing.
func (lk *Lock) Fence() Fence { return lk.grant.fence }

// Context returns a context that ends when the lock is lost or released. Its cause then is an *Error that matches
// ErrLost, or ErrReleased. It has the values of the context that the lock was acquired with; inside Do it ends with
// that context too, but a Lock of Acquire does not: work that is to stop with the acquiring context has to look at both,
// or use Do. A context derived from it keeps the Lock from being garbage-collected until it ends.
func (lk *Lock) Context() context.Context { return &lk.ctx }

// Deadline returns when the lease ends unless it is renewed before. It moves with every renewal.
func (lk *Lock) Deadline() time.Time { return lk.grant.end() }

// Valid tells whether the lock is held and its deadline has not passed. It reads the clock, so it is right at once
// after the process was stopped and goes on; on Linux it counts the time of a suspended machine too. It asks nobody.
func (lk *Lock) Valid() bool { return lk.grant.check() == nil }

// Extend makes the lease last for at least ttl from now; it never shortens it. Later renewals use the Locker's TTL
// again. It is for work that can't be renewed for a while, such as before a planned pause.
//
// A Redis that fails is tried again for about a second, or two if it does not answer, or until ctx ends. The error is an *Error: it matches ErrLost
// or ErrReleased if the lock is no longer held, ErrUnknown if no answer came; then the lock is as valid as before.
// An invalid ttl changes nothing.
func (lk *Lock) Extend(ctx context.Context, ttl time.Duration) error {
	if err := lk.extend(ctx, ttl.Truncate(time.Millisecond)); err != nil {
		return &Error{Op: "extend", Name: lk.name, Err: err}
	}
	return nil
}

func (lk *Lock) extend(ctx context.Context, ttl time.Duration) error {
	if err := checkTTL(ttl); err != nil {
		return err
	}
	if err := lk.grant.check(); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return call.ContextError(ctx)
	}
	l := lk.grant.lease
	r := l.req
	r.TTL = ttl
	err := persist(ctx, func() error {
		if err := lk.grant.stretch(ttl); err != nil {
			return err
		}
		step, cancel := context.WithTimeout(ctx, call.Limit)
		defer cancel()
		sent := now()
		var err error
		lk.core.store.Renew(step, []Request{r}, func(_ int, _ Reply, e error) { err = e })
		switch {
		case err == nil:
			return l.confirm(sent, ttl)
		case step.Err() != nil && ctx.Err() == nil:
			return fmt.Errorf("%w: no answer within %v", ErrUnknown, call.Limit)
		}
		return err
	})
	if errors.Is(err, ErrLost) {
		l.lose(errGone)
		return lk.grant.check()
	}
	return err
}

// persist repeats step while it fails for a reason that may pass, until ctx or the budget ends, but at least once: the
// first may have spent the budget on a connection that is dead.
func persist(ctx context.Context, step func() error) error {
	var pause wait.Pause
	var unknown error
	end := time.Now().Add(releaseBudget)
	for again := false; ; again = true {
		err := step()
		if err == nil || errors.Is(err, ErrLost) || errors.Is(err, ErrReleased) {
			return err
		}
		if errors.Is(err, ErrUnknown) {
			unknown = err
		} else if unknown != nil {
			err = fmt.Errorf("%w; before: %w", err, unknown)
		}
		if isPermanent(err) || again && !time.Now().Before(end) || !wait.Sleep(ctx, pause.Next(0)) {
			return withContext(ctx, err)
		}
	}
}

// Release gives the lock up. The lock's context ends first, with the cause ErrReleased; then the key is deleted.
//
// It tries even if ctx has ended, for about a second; a defer lk.Release(ctx) is right. If ctx ends meanwhile it
// returns soon, and the delete goes on in the background for as long as the lease may last.
//
// It returns nil if the lock was released, also by an earlier call, and an *Error that matches ErrLost if the lock was
// lost before. These outcomes are final. Otherwise Redis could not be reached, or, if it matches ErrUnknown, did not
// answer; a further call tries again. Concurrent calls wait for the one under way.
func (lk *Lock) Release(ctx context.Context) (err error) {
	if ctx.Err() != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), releaseBudget)
		defer cancel()
	}
	if settled, err := lk.enter(ctx); settled || err != nil {
		return err
	}
	var final bool
	defer func() { lk.leave(err, final) }()
	if err, final = lk.release(ctx); err != nil {
		err = &Error{Op: "release", Name: lk.name, Err: err}
	}
	return err
}

// enter waits for a Release under way. It returns the outcome if that is settled; otherwise it is the caller's turn.
func (lk *Lock) enter(ctx context.Context) (settled bool, err error) {
	lk.mu.Lock()
	defer lk.mu.Unlock()
	for lk.releasing {
		if lk.after == nil {
			lk.after = make(chan struct{})
		}
		after := lk.after
		lk.mu.Unlock()
		select {
		case <-after:
		case <-ctx.Done():
		}
		lk.mu.Lock()
		if lk.releasing && ctx.Err() != nil {
			return false, &Error{Op: "release", Name: lk.name, Err: fmt.Errorf("%w: %w", ErrUnknown, call.ContextError(ctx))}
		}
	}
	if lk.settled {
		return true, lk.outcome
	}
	lk.releasing = true
	return false, nil
}

func (lk *Lock) leave(err error, final bool) {
	lk.mu.Lock()
	defer lk.mu.Unlock()
	lk.releasing = false
	if final {
		lk.settled, lk.outcome = true, err
	}
	if lk.after != nil {
		close(lk.after)
		lk.after = nil
	}
}

// release passes the lease on, or ends it and deletes the key. It tells whether the outcome is definite.
func (lk *Lock) release(ctx context.Context) (err error, final bool) {
	g, l := lk.grant, lk.grant.lease
	if lk.keep.IsZero() && lk.core.passOn(g) {
		return nil, true
	}
	lk.core.dog.count(1)
	defer lk.core.dog.count(-1)
	began := time.Now()
	var reply Reply
	switch err := g.finish(); {
	case err == nil:
		defer func() { lk.core.vacate(l, reply, time.Since(began)) }()
	case err == errGone:
		lk.core.sweepStrays(l.req, l.strays)
		return err, true
	case err != ErrReleased:
		lk.sweep() // it may be there yet: renewals may have arrived whose answers did not
		return err, true
	}
	err = persist(ctx, func() (err error) {
		r := l.ending(lk.keep)
		r.Known = !l.apart // the turn is passed on when this is done
		reply, err = lk.core.store.Release(ctx, r)
		if errors.Is(err, ErrUnknown) {
			lk.unsure = err
		}
		return err
	})
	if errors.Is(err, ErrLost) && (lk.unsure != nil || !time.Now().Before(g.end())) {
		err = nil // gone: an earlier delete has worked, or the lease ran out on the way, after it was given up
	}
	switch {
	case err == nil, errors.Is(err, ErrLost):
		lk.core.sweepStrays(l.req, l.strays)
		if err != nil {
			return errGone, true
		}
		lk.core.warnMute(reply, g.logger)
		return nil, true
	default:
		if lk.unsure == nil {
			lk.unsure = err
		}
		lk.sweep()
		return err, false
	}
}

// warnMute says once if waiters are not told of releases.
func (c *core) warnMute(r Reply, logger *slog.Logger) {
	if r.Mute != nil && !c.mute.Swap(true) {
		orDefault(logger).Warn("lock: waiters are not told of releases, and find out by asking", "error", r.Mute)
	}
}

// ending is the request that gives the key up now, or leaves it until keep.
func (l *lease) ending(keep time.Time) Request {
	r := Request{Key: l.req.Key, Token: l.req.Token}
	if !keep.IsZero() {
		r.Hold = max(0, time.Until(keep))
	}
	return r
}

// sweep goes on releasing in the background, for as long as the key may last.
func (lk *Lock) sweep() {
	if !lk.swept {
		lk.swept = true
		lk.core.end(lk.grant.lease, lk.keep, nil)
	}
}

// end releases in the background, for as long as the key may last. It calls tried, if that is not nil,
// after the first try.
func (c *core) end(l *lease, keep time.Time, tried func(Reply)) {
	c.sweeper.Add(sweep.Task{Until: l.lasts(), Do: func(ctx context.Context) bool {
		reply, err := c.store.Release(ctx, l.ending(keep))
		if tried != nil {
			tried(reply)
			tried = nil
		}
		if err == nil || errors.Is(err, ErrLost) {
			c.sweepStrays(l.req, l.strays)
			return true
		}
		return isPermanent(err)
	}})
}

// lockContext is the context of a Lock. It embeds a standard cancel context, as contexts derived from any other cost a
// goroutine each, and knows its Lock.
type lockContext struct {
	context.Context
	values context.Context // whose values it has; nil if those of the embedded one suffice
	lock   *Lock
}

type lockKey struct{}

// Value returns the Lock for the package's own key, else what the acquiring context has.
func (c *lockContext) Value(key any) any {
	if key == (lockKey{}) {
		return c.lock
	}
	if v := c.Context.Value(key); v != nil || c.values == nil {
		return v
	}
	return c.values.Value(key)
}

// FromContext returns the innermost lock that ctx belongs to: inside the fn of Do, the one that fn holds.
func FromContext(ctx context.Context) (*Lock, bool) {
	lk, ok := ctx.Value(lockKey{}).(*Lock)
	return lk, ok
}

// outer returns the lock under which lk was acquired.
func (lk *Lock) outer() (*Lock, bool) {
	if lk.ctx.values != nil {
		return FromContext(lk.ctx.values)
	}
	return FromContext(lk.ctx.Context)
}

// options are the settings of a Locker.
type options struct {
	ttl     time.Duration
	prefix  string
	fence   FenceMode
	logger  *slog.Logger // nil: slog.Default()
	maxWait time.Duration
	maxHold time.Duration
	minHold time.Duration

	handoffs int
}

func (o *options) check() error {
	for _, d := range []struct {
		option string
		value  time.Duration
	}{{"WithMaxWait", o.maxWait}, {"WithMaxHold", o.maxHold}, {"WithMinHold", o.minHold}} {
		if d.value < 0 || d.value > maxTTL {
			return fmt.Errorf("%s: %v is not between 0 and %v", d.option, d.value, maxTTL)
		}
	}
	if o.handoffs < 0 || o.handoffs > maxHandoffs {
		return fmt.Errorf("WithMaxHandoffs: %d is not between 0 and %d", o.handoffs, maxHandoffs)
	}
	if err := keys.CheckPrefix(o.prefix); err != nil {
		return fmt.Errorf("WithPrefix: %w", err)
	}
	if err := checkTTL(o.ttl); err != nil {
		return fmt.Errorf("WithTTL: %w", err)
	}
	return nil
}

func checkTTL(ttl time.Duration) error {
	if ttl < minTTL || ttl > maxTTL {
		return fmt.Errorf("a TTL of %v is not between %v and %v", ttl, minTTL, maxTTL)
	}
	return nil
}

// An Option is a setting of New and With.
type Option func(*options)

// WithTTL sets how long a lease lasts unless it is renewed: 10 s by default, at least 10 ms, in whole milliseconds.
// Others wait that long for the lock of a process that has crashed. It is renewed three times in that time; a holder
// that can't reach Redis is told of the loss shortly before that time is over.
func WithTTL(d time.Duration) Option {
	return func(o *options) { o.ttl = d.Truncate(time.Millisecond) }
}

// WithPrefix sets what all keys begin with, for example a tenant. Lockers with different prefixes do not exclude each
// other, provided that neither prefix begins with the other. A prefix with a hash tag keeps all its names in one cluster slot; one
// with a brace but no complete tag is invalid.
func WithPrefix(prefix string) Option {
	return func(o *options) { o.prefix = prefix }
}

// WithFencing gives every grant a Fence, from a counter that Redis keeps for each name: one small key, which must not
// be deleted and does not expire. Numbers are as durable as Redis's data; a server that loses it starts again from 1.
func WithFencing() Option {
	return func(o *options) { o.fence = FenceCounter }
}

// WithClockFencing is WithFencing, with numbers that go on rising when Redis has lost its data: each is at least the
// server's clock in microseconds. That holds as far as the clock of the server that takes over is not behind that of
// the one before.
func WithClockFencing() Option {
	return func(o *options) { o.fence = FenceClock }
}

// WithLogger sets where losses, failed releases and forgotten locks are reported. The default, also for nil, is
// slog.Default().
func WithLogger(logger *slog.Logger) Option {
	return func(o *options) { o.logger = logger }
}

// WithMaxWait bounds how long Acquire and Do wait for the lock, where ctx bounds the work too. Zero, the default, does
// not.
func WithMaxWait(d time.Duration) Option {
	return func(o *options) { o.maxWait = d }
}

// WithMaxHold ends renewal so that no renewal carries the lease beyond d after the grant: then the lock is lost, and a
// section that hangs does not block others for ever. The first lease lasts for the TTL, also if d is shorter. Zero, the
// default, sets no end. Extend is not bound by it.
func WithMaxHold(d time.Duration) Option {
	return func(o *options) { o.maxHold = d }
}

// WithMinHold keeps the name locked for at least d after the grant, also if it is released earlier: then nobody holds
// it, and nobody can take it until then. A job that takes 5 ms runs once a period on a fleet of skewed clocks if d is
// longer than the skew. Zero, the default, keeps nothing.
func WithMinHold(d time.Duration) Option {
	return func(o *options) { o.minHold = d }
}

// WithMaxHandoffs sets how often in a row a lock may be passed from one waiter of the process to the next without asking
// Redis: 16 times by default, and for one second at most. When it is known that no other process waits, a row may be
// longer, but not in time. Zero turns passing off: then each release is one in Redis. At most 1024.
func WithMaxHandoffs(n int) Option {
	return func(o *options) { o.handoffs = n }
}

// noDefault is the Store behind Default before SetDefault: it fails closed.
type noDefault struct{}

func (noDefault) Acquire(context.Context, Request) (Reply, error) {
	return Reply{}, Permanent(ErrNoDefault)
}

func (noDefault) Renew(_ context.Context, rs []Request, done func(int, Reply, error)) {
	for i := range rs {
		done(i, Reply{}, Permanent(ErrNoDefault))
	}
}

func (noDefault) Release(context.Context, Request) (Reply, error) {
	return Reply{}, Permanent(ErrNoDefault)
}

func (noDefault) Listen(context.Context, Key, func()) (func(), error) {
	return nil, errors.ErrUnsupported
}

func (noDefault) Wait(context.Context) error { return nil }

var defaultLocker atomic.Pointer[Locker]

func init() { defaultLocker.Store(NewWithStore(noDefault{})) }

// SetDefault makes l the Locker of the package-level functions. It panics if l is nil.
func SetDefault(l *Locker) {
	if l == nil {
		panic("lock: SetDefault of a nil Locker")
	}
	defaultLocker.Store(l)
}

// Default returns the Locker of the package-level functions. Before SetDefault it is one whose calls fail with
// ErrNoDefault.
func Default() *Locker { return defaultLocker.Load() }

// Do calls Do of the default Locker.
func Do(ctx context.Context, name string, fn func(ctx context.Context) error) error {
	return Default().Do(ctx, name, fn)
}

// TryDo calls TryDo of the default Locker.
func TryDo(ctx context.Context, name string, fn func(ctx context.Context) error) error {
	return Default().TryDo(ctx, name, fn)
}
