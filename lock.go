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
// there). The recommended client has ContextTimeoutEnabled: a command then needs no goroutine of its own. Above a few
// commands at a time those of different goroutines share pipelines, where a deadline and a cancellation are both obeyed
// within 20 ms; not in a cluster.
//
// # Waiting
//
// Who waits is woken by a release, in any process, and does not poll. Within a process waiters are served in the order
// in which they came, and only the first of them asks Redis. A release hands the lock to the next waiter of the process
// without a round trip: the lease goes on, with a new context and, with fencing, a higher fence. That is done up to 16
// times in a row while others listen ([WithMaxHandoffs]) and for one second at most; then the lock is released in Redis,
// and the process stands back for a moment, until another has taken it. One other process that waits gets in within
// eight such releases, as the moment grows while it does not come.
//
// A release that tells nobody, such as a deletion by hand, is noticed within one second.
//
// # What a server must allow
//
// SET, GET, PTTL, PEXPIRE, DEL, EVALSHA and EVAL on the lock keys; with fencing INCRBY, GET, SET and, for
// [WithClockFencing], TIME on the fence keys; and to wake waiters SPUBLISH, SSUBSCRIBE, SUNSUBSCRIBE, PUBSUB SHARDNUMSUB
// and PING, before Redis 7 those without the S, on channels that are named as the lock keys are. Without these waiters
// ask a few times a second. Nothing else is sent. A name N with prefix P is at the key P+"lock:"+N, where redis-py and
// most locks written by hand have it too. Its fence counter is in the same cluster slot, at a key that begins with
// P+"fence:".
package lock

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seed-b640e7e9/lock/internal/call"
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
	id      string      // of the room, in messages that need not wake those who wait in it
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
	c := &core{store: s, dog: newWatchdog(s, room), room: room, id: newToken(), sweeper: sweep.New(sweeps, call.Limit)}
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
// A grant that comes too late to be of use, with a quarter of the TTL or less left, is not returned but renewed first.
//
// The error is an *Error. It matches ErrHeld if another held the lock up to the end, and ctx's error if that was the
// end; ErrUnknown if the last command got no answer; ErrReentrant at once if ctx comes from a holder of the lock.
// Otherwise it carries the client's error: Redis could not be reached, or refused. What time may heal is tried again,
// with growing pauses, for as long as ctx and WithMaxWait let it; what it does not heal, such as missing permissions,
// is returned at once.
func (l *Locker) Acquire(ctx context.Context, name string) (*Lock, error) {
	return l.take(ctx, name, false, false)
}

// TryAcquire is Acquire, but makes one attempt, also if others wait: if another holds the lock, its error matches
// ErrHeld. An attempt whose outcome is unknown is asked about once more.
func (l *Locker) TryAcquire(ctx context.Context, name string) (*Lock, error) {
	return l.take(ctx, name, true, false)
}

// Wait returns nil when no lease of l and its variants is held, nobody waits for one, and no clean-up and no subscription
// is left, or ctx's error. Call it before the process exits, so that deletes in the background are not cut off; and at
// the end of tests.
func (l *Locker) Wait(ctx context.Context) error {
	for {
		for _, wait := range []func(context.Context) error{l.core.dog.wait, l.core.sweeper.Wait, l.core.store.Wait} {
			if err := wait(ctx); err != nil {
				return err
			}
		}
		if l.core.dog.idleNow() && l.core.sweeper.Left() == 0 { // still, or again
			return nil
		}
	}
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

	tether *tether // given back when the outcome is settled

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
	r := l.request()
	r.TTL, r.Live = ttl, l.live
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
