package lock

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"
	"weak"

	"github.com/seed-b640e7e9/lock/internal/clock"
	"github.com/seed-b640e7e9/lock/internal/due"
)

// drift is what the server's clock may gain on the client's within a lease of the given TTL. The allowance is the one
// of the Redlock description (redis.io, "Distributed Locks with Redis"): 1 % for the clocks, 2 ms for the precision of
// expiry and for short leases.
func drift(ttl time.Duration) time.Duration { return ttl/100 + 2*time.Millisecond }

// moment is an instant on Go's monotonic clock, and how long the machine had been suspended by then.
type moment struct {
	time      time.Time
	suspended time.Duration
}

// now is called before the first byte of a command leaves: the server can only begin to count later.
func now() moment { return moment{suspended: clock.AtLeast(), time: time.Now()} }

// strays counts sends that may have taken the key, or may do so yet: their outcome is unknown.
type strays struct {
	n    int
	last time.Time // when the last of them was sent
}

func (s *strays) add(sent moment) { s.n, s.last = s.n+1, sent.time }

// lease is what a Locker holds in Redis: one token, for a row of grants. It reaches neither a Lock nor a context that
// carries one: else a forgotten Lock would never be collected.
type lease struct {
	dog    *watchdog
	name   string
	key    Key
	token  string
	kind   kind
	strays strays
	renew  due.Item[*lease] // the next renewal, in the watchdog's queue
	alarm  due.Item[*lease] // the deadline, in its other one

	mu        sync.Mutex // guards all below, and the grants
	first     grant
	holder    *grant        // the current grant
	run       run           // of grants
	ended     error         // nil while held; then ErrReleased, or an error that matches ErrLost
	confirmed time.Time     // when the last command was sent that the server has confirmed
	deadline  time.Time     // the lease must not be trusted from then on
	suspended time.Duration // how long the machine had been when the command was sent that the deadline counts from
	reach     time.Time     // when the key ends at the latest, whatever became of the commands sent for it
	failure   error         // of the last renewal, if it failed
	failures  uint8         // how many have since the last confirmed one
	extended  bool          // the key may last longer than the TTL says
	unsaid    bool          // it is lost, and that is not reported yet
	apart     bool          // the room knows nothing of it; not guarded
}

// request begins what is sent for the lease.
func (l *lease) request() Request {
	return Request{Key: l.key, Token: l.token, TTL: l.kind.ttl, Fence: l.kind.fence}
}

// grant is one caller's turn under a lease. Its fields are guarded by the lease's mutex once it is under way.
type grant struct {
	lease  *lease
	fence  Fence
	logger *slog.Logger            // nil: slog.Default()
	until  time.Time               // no renewal carries the lease beyond it; zero: none does not
	cancel context.CancelCauseFunc // ends the Lock's context; nil while there is no Lock yet
	handle weak.Pointer[tether]    // the Lock's
	ended  error                   // nil while held; then ErrReleased, or an error that matches ErrLost
	last   time.Time               // the deadline that the lease had then
}

// tether is what a Lock holds on to as long as it can be reached, and its lease only by a weak pointer. A Lock that was
// released gives it back, as a weak pointer is dear to make.
type tether struct{ self weak.Pointer[tether] }

var tethers = sync.Pool{New: func() any {
	t := new(tether)
	t.self = weak.Make(t)
	return t
}}

// begin puts l under watch.
func (l *lease) begin() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended == nil {
		l.dog.alarms.Put(&l.alarm, l.deadline)
		l.planLocked(l.renewAt(l.confirmed))
	}
}

// renewAt returns when to renew after a command that was sent then: when a third of the TTL is over, or a little earlier at
// random, so that leases taken at the same time do not stay together; and then a little earlier again, so that those of
// many leases fall on the same instants. Else each would take a pipeline of its own, and a client has few at a time.
func (l *lease) renewAt(sent time.Time) time.Time {
	at := sent.Add(l.kind.ttl/3 - rand.N(l.kind.ttl/30))
	return at.Add(-(at.Sub(l.dog.began) % min(l.kind.ttl/60, grid)))
}

// attach makes lk the handle of the grant, and cancel what ends its context: at once if the grant has ended already.
func (g *grant) attach(lk *Lock, cancel context.CancelCauseFunc, o *options) {
	l := g.lease
	l.mu.Lock()
	defer l.mu.Unlock()
	lk.tether = tethers.Get().(*tether)
	g.handle, g.cancel, g.logger = lk.tether.self, cancel, o.logger
	if o.maxHold > 0 {
		began := time.Now()
		if g == &l.first {
			began = l.confirmed
		}
		g.until = began.Add(o.maxHold)
	}
	if g.ended != nil {
		cancel(g.cause(g.ended))
	}
}

// check returns nil while the grant is held, else how it has ended. It looks at the clock rather than wait for the
// alarm, so it is right at once when a process was frozen and goes on.
func (g *grant) check() error {
	suspended := clock.AtMost()
	g.lease.mu.Lock()
	defer g.lease.mu.Unlock()
	g.lease.checkLocked(suspended)
	return g.ended
}

// checkLocked loses the lease if its time is over, also if the machine has been suspended meanwhile, which the monotonic
// clock does not count: for as long as that in all, as clock.AtMost says.
func (l *lease) checkLocked(suspended time.Duration) {
	if l.ended == nil && time.Until(l.deadline) <= suspended-l.suspended {
		l.loseLocked(l.unconfirmedLocked())
	}
}

// overLocked is checkLocked where the server's word follows or has come, on which a suspension has no bearing. It spares
// system calls.
func (l *lease) overLocked() { l.checkLocked(l.suspended) }

// overslept tells whether the lease had ended by then if suspensions of the machine are counted. It counts one that came
// after that too, which errs on the safe side.
func (g *grant) overslept(by time.Time) bool {
	suspended := clock.AtMost()
	g.lease.mu.Lock()
	defer g.lease.mu.Unlock()
	return g.last.Sub(by) <= suspended-g.lease.suspended
}

// reachLocked accounts for a command that may make the key last for ttl from then.
func (l *lease) reachLocked(at time.Time, ttl time.Duration) {
	if end := at.Add(ttl); end.After(l.reach) {
		l.reach = end
	}
}

// lasts returns when the key ends at the latest.
func (l *lease) lasts() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.reach
}

// end returns the lease's deadline, or the one that it had when the grant ended.
func (g *grant) end() time.Time {
	g.lease.mu.Lock()
	defer g.lease.mu.Unlock()
	if g.ended != nil {
		return g.last
	}
	return g.lease.deadline
}

// unconfirmedLocked is the loss that nobody told of: the time is over, and no answer has prolonged it.
func (l *lease) unconfirmedLocked() error {
	switch {
	case l.lastLocked():
		return fmt.Errorf("%w: held for as long as WithMaxHold allows", ErrLost)
	case l.failure == nil:
		return fmt.Errorf("%w: %w: the lease ran out", ErrLost, ErrUnknown)
	case errors.Is(l.failure, ErrUnknown):
		return fmt.Errorf("%w: the lease ran out: %w", ErrLost, l.failure)
	default:
		return fmt.Errorf("%w: %w: the lease ran out: %w", ErrLost, ErrUnknown, l.failure)
	}
}

// errForgotten is the end of a lease whose Lock nobody can release any more.
var errForgotten = fmt.Errorf("%w: the Lock was dropped without Release", ErrLost)

// errGone is the loss that the server tells of.
var errGone = fmt.Errorf("%w: the key is gone or another's", ErrLost)

// confirm accounts for a command, sent at that moment, after which the server keeps the lease for at least ttl. The
// deadline never moves back, and an ended lease is not revived: then its end is returned.
func (l *lease) confirm(sent moment, ttl time.Duration) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.overLocked()
	if l.ended != nil {
		return l.ended
	}
	if sent.time.After(l.confirmed) {
		l.confirmed = sent.time
		l.failures, l.failure = 0, nil
	}
	if d := sent.time.Add(ttl - drift(ttl)); d.After(l.deadline) {
		l.deadline, l.suspended = d, sent.suspended
		l.dog.alarms.Put(&l.alarm, d)
	}
	return nil
}

// lose ends the lease because of err, which matches ErrLost.
func (l *lease) lose(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended == nil {
		l.loseLocked(err)
	}
}

// loseLocked tells the holder, and leaves what may take its time to the alarm.
func (l *lease) loseLocked(err error) {
	l.endLocked(err)
	l.unsaid = true
	l.dog.alarms.Put(&l.alarm, time.Now())
}

// finish ends the lease from the side of its holder, or returns how the grant has ended before.
func (g *grant) finish() error {
	g.lease.mu.Lock()
	defer g.lease.mu.Unlock()
	g.lease.overLocked()
	if g.ended == nil {
		g.lease.endLocked(ErrReleased)
		return nil
	}
	return g.ended
}

// endLocked tells the holder and stops everything that keeps the lease alive.
func (l *lease) endLocked(how error) {
	l.ended = how
	l.holder.endLocked(how)
	if l.holder.cancel != nil {
		l.holder.cancel(l.holder.cause(how))
	}
	l.dog.alarms.Remove(&l.alarm)
	l.dog.renewals.Remove(&l.renew)
	l.dog.count(-1)
}

func (g *grant) endLocked(how error) { g.ended, g.last = how, g.lease.deadline }

// cause is what the Lock's context ends with.
func (g *grant) cause(how error) error {
	if how == ErrReleased {
		return how
	}
	return &Error{Op: "hold", Name: g.lease.name, Err: how}
}

// planLocked sets the time of the next renewal.
func (l *lease) planLocked(at time.Time) {
	if l.ended == nil {
		l.dog.renewals.Put(&l.renew, at)
	}
}

func orDefault(logger *slog.Logger) *slog.Logger {
	if logger == nil {
		return slog.Default()
	}
	return logger
}

// held tells whether the lease is held.
func (l *lease) held() bool {
	suspended := clock.AtMost()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.checkLocked(suspended)
	return l.ended == nil
}

// live tells whether the lease has not ended: a Store may ask, as Release may have come meanwhile.
func (l *lease) live() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.ended == nil
}

// longest is how long the key may last from now.
func (l *lease) longest() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.extended {
		return l.kind.ttl
	}
	return max(time.Until(l.reach), l.kind.ttl)
}

// lasting tells whether the grant is held, and enough of the lease is left to begin something.
func (g *grant) lasting() bool {
	g.lease.mu.Lock()
	defer g.lease.mu.Unlock()
	g.lease.overLocked() // who has passed it on has just counted suspensions
	return g.ended == nil && time.Until(g.lease.deadline) > g.lease.kind.ttl/4
}

// stretch accounts for a command that is to make the key last for ttl: such a lease is not passed on. It returns how
// the grant has ended, if it has.
func (g *grant) stretch(ttl time.Duration) error {
	l, suspended := g.lease, clock.AtMost()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.checkLocked(suspended)
	if g.ended == nil {
		l.extended = true
		l.reachLocked(time.Now(), ttl)
	}
	return g.ended
}

// renewal returns what to send for l, if anything, and plans the next try in case no answer comes.
func (l *lease) renewal(at time.Time, suspended time.Duration) (Request, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.checkLocked(suspended)
	if l.ended != nil {
		return Request{}, false
	}
	if l.holder.cancel != nil && l.holder.handle.Value() == nil {
		l.loseLocked(errForgotten)
		return Request{}, false
	}
	if l.lastLocked() {
		return Request{}, false
	}
	r := l.request()
	r.TTL, r.Live = l.ttlLocked(at), l.live
	l.reachLocked(at, r.TTL)
	l.planLocked(at.Add(l.kind.ttl / 6))
	return r, true
}

// ttlLocked is the TTL that a renewal at that time may give to the lease.
func (l *lease) ttlLocked(at time.Time) time.Duration {
	if l.holder.until.IsZero() {
		return l.kind.ttl
	}
	return min(l.kind.ttl, l.holder.until.Sub(at).Truncate(time.Millisecond))
}

// lastLocked tells whether the lease reaches as far as renewals may carry it.
func (l *lease) lastLocked() bool {
	until := l.holder.until
	return !until.IsZero() && !l.deadline.Before(until.Add(-drift(l.kind.ttl)))
}

// renewed accounts for the answer to a renewal.
func (l *lease) renewed(sent moment, ttl time.Duration, err error) {
	switch {
	case err == nil:
		if l.confirm(sent, ttl) == nil {
			l.plan(sent.time)
		}
	case errors.Is(err, ErrLost):
		l.lose(errGone)
	default:
		l.failed(sent, err)
	}
}

// plan sets the time of the renewal after one that was sent then, unless a later command has been confirmed.
func (l *lease) plan(sent time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.confirmed.After(sent) {
		l.planLocked(l.renewAt(sent))
	}
}

// failed plans the next try after one of no avail: soon, then with growing pauses, but again sooner near the deadline.
func (l *lease) failed(sent moment, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.confirmed.After(sent.time) {
		return
	}
	l.failure = err
	least := l.kind.ttl / 60
	pause := min(least<<l.failures, l.kind.ttl/6, max(time.Until(l.deadline)/3, least))
	l.failures = min(l.failures+1, 8)
	l.planLocked(time.Now().Add(pause/2 + rand.N(pause/2)))
}
