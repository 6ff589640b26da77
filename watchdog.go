package lock

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
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

// lease is what a Locker holds in Redis. It reaches neither the Lock nor a context that carries it: else a forgotten
// Lock would never be collected.
type lease struct {
	dog    *watchdog
	name   string
	req    Request
	cancel context.CancelCauseFunc // ends the grant's context
	handle weak.Pointer[Lock]      // the grant
	logger *slog.Logger            // nil: slog.Default()
	until  time.Time               // no renewal carries the lease beyond it; zero: none does not
	strays strays
	renew  due.Item[*lease] // the next renewal, in the watchdog's queue
	alarm  due.Item[*lease] // the deadline, in its other one

	mu        sync.Mutex // guards all below
	ended     error      // nil while held; then ErrReleased, or an error that matches ErrLost
	confirmed moment     // when the last command was sent that the server has confirmed
	deadline  time.Time  // the lease must not be trusted from then on
	failures  int        // renewals that failed since the last confirmed one
	failure   error      // the last of them
	report    string     // what to log once the mutex is free
}

// begin puts l under watch, confirmed by a command that was sent at that moment.
func (l *lease) begin(sent moment) {
	l.mu.Lock()
	defer l.unlock()
	l.renew.Value, l.alarm.Value = l, l
	l.confirmed = sent
	l.deadline = sent.time.Add(l.req.TTL - drift(l.req.TTL))
	l.dog.alarms.Put(&l.alarm, l.deadline)
	l.dog.count(1)
	l.planLocked(sent.time.Add(l.interval()))
}

// interval is the time from one renewal to the next: a third of the TTL, less a little at random, so that leases taken
// at the same time do not stay together.
func (l *lease) interval() time.Duration { return l.req.TTL/3 - rand.N(l.req.TTL/30) }

// check returns nil while the lease is held, else how it has ended. It looks at the clock rather than wait for the
// alarm, so it is right at once when a process was frozen and goes on.
func (l *lease) check() error {
	l.mu.Lock()
	defer l.unlock()
	return l.checkLocked()
}

func (l *lease) checkLocked() error {
	if l.ended == nil && !time.Now().Before(l.deadline) {
		l.loseLocked(l.unconfirmedLocked())
	}
	return l.ended
}

// valid is check, but counts the time in which the machine was suspended too.
func (l *lease) valid() bool {
	l.mu.Lock()
	defer l.unlock()
	if l.checkLocked() != nil {
		return false
	}
	return time.Until(l.deadline) > clock.AtMost()-l.confirmed.suspended
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
	defer l.unlock()
	if err := l.checkLocked(); err != nil {
		return err
	}
	if sent.time.After(l.confirmed.time) {
		l.confirmed = sent
		l.failures, l.failure = 0, nil
	}
	if d := sent.time.Add(ttl - drift(ttl)); d.After(l.deadline) {
		l.deadline = d
		l.dog.alarms.Put(&l.alarm, d)
	}
	return nil
}

// unlock ends a critical section of the lease, and reports what it has to report outside: a log handler may take its
// time, or ask the Lock.
func (l *lease) unlock() {
	report := l.report
	l.report = ""
	err := l.ended
	l.mu.Unlock()
	if report != "" {
		l.log().Warn(report, "name", l.name, "error", err)
	}
}

// lose ends the lease because of err, which matches ErrLost, and returns how it has ended, maybe before.
func (l *lease) lose(err error) error {
	l.mu.Lock()
	defer l.unlock()
	if l.ended == nil {
		l.loseLocked(err)
	}
	return l.ended
}

func (l *lease) loseLocked(err error) {
	l.endLocked(err)
	l.report = "lock: lost"
}

// finish ends the lease from the holder's side, or returns how it has ended before.
func (l *lease) finish() error {
	l.mu.Lock()
	defer l.unlock()
	if err := l.checkLocked(); err != nil {
		return err
	}
	l.endLocked(ErrReleased)
	return nil
}

// endLocked tells the holder and stops everything that keeps the lease alive.
func (l *lease) endLocked(cause error) {
	l.ended = cause
	if cause != ErrReleased {
		cause = &Error{Op: "hold", Name: l.name, Err: cause}
	}
	l.cancel(cause)
	l.dog.alarms.Remove(&l.alarm)
	l.dog.renewals.Remove(&l.renew)
	l.dog.count(-1)
}

// planLocked sets the time of the next renewal.
func (l *lease) planLocked(at time.Time) {
	if l.ended == nil {
		l.dog.renewals.Put(&l.renew, at)
	}
}

func (l *lease) log() *slog.Logger {
	if l.logger == nil {
		return slog.Default()
	}
	return l.logger
}

// watchdog renews the leases of a Locker and its variants, and raises the alarm at their deadlines. While it waits
// there are two timers and no goroutine. When a lease is due, it is renewed together with all that are due about then,
// in pipelines that run side by side and that nothing else waits for. A renewal that gets no answer is sent again, on
// another connection, long before the deadline.
type watchdog struct {
	store    Store
	renewals *due.Queue[*lease]
	alarms   *due.Queue[*lease]

	mu   sync.Mutex    // guards all below
	busy int           // held leases, and pipelines under way
	idle chan struct{} // closed when busy becomes 0; nil while nobody waits for that
}

const (
	slack = time.Millisecond // how much earlier than planned a lease is renewed to go with others
	chunk = 100              // renewals in a pipeline
)

func newWatchdog(s Store) *watchdog {
	w := &watchdog{store: s}
	w.renewals = due.New(slack, w.renewAll)
	w.alarms = due.New(0, alarm)
	return w
}

// alarm tells the holders of leases whose deadline has come. It waits for nobody: what is to be logged is logged when
// all have been told.
func alarm(ls []*lease) {
	for _, l := range ls {
		l.mu.Lock()
		_ = l.checkLocked()
		l.mu.Unlock()
	}
	for _, l := range ls {
		l.mu.Lock()
		l.unlock()
	}
}

// renewAll renews leases of one TTL together, as it says how long an answer may take.
func (w *watchdog) renewAll(ls []*lease) {
	slices.SortStableFunc(ls, func(a, b *lease) int { return int(a.req.TTL - b.req.TTL) })
	for len(ls) > 0 {
		n := 1
		for n < len(ls) && n < chunk && ls[n].req.TTL == ls[0].req.TTL {
			n++
		}
		part := ls[:n]
		ls = ls[n:]
		w.count(1)
		go w.renew(part)
	}
}

// renew sends one renewal for each lease. Answers are used until the leases would have run out.
func (w *watchdog) renew(ls []*lease) {
	defer w.count(-1)
	sent := now()
	var live []*lease
	var rs []Request
	for _, l := range ls {
		if r, ok := l.renewal(sent.time); ok {
			live, rs = append(live, l), append(rs, r)
		}
	}
	if len(live) == 0 {
		return
	}
	ctx, cancel := context.WithDeadline(context.Background(), sent.time.Add(rs[0].TTL))
	defer cancel()
	w.store.Renew(ctx, rs, func(i int, err error) { live[i].renewed(sent, rs[i].TTL, err) })
}

// renewal returns what to send for l, if anything, and plans the next try in case no answer comes.
func (l *lease) renewal(at time.Time) (Request, bool) {
	forgotten := l.handle.Value() == nil
	l.mu.Lock()
	defer l.unlock()
	if l.checkLocked() != nil {
		return Request{}, false
	}
	if forgotten {
		l.endLocked(errForgotten)
		l.report = "lock: no longer renewed"
		return Request{}, false
	}
	r := l.req
	if l.lastLocked() {
		return Request{}, false
	}
	if !l.until.IsZero() {
		r.TTL = min(r.TTL, l.until.Sub(at).Truncate(time.Millisecond))
	}
	l.planLocked(at.Add(l.req.TTL / 6))
	return r, true
}

// lastLocked tells whether the lease reaches as far as renewals may carry it.
func (l *lease) lastLocked() bool {
	return !l.until.IsZero() && !l.deadline.Before(l.until.Add(-drift(l.req.TTL)))
}

// renewed accounts for the answer to a renewal.
func (l *lease) renewed(sent moment, ttl time.Duration, err error) {
	switch {
	case err == nil:
		if l.confirm(sent, ttl) == nil {
			l.plan(sent, sent.time.Add(l.interval()))
		}
	case errors.Is(err, ErrLost):
		_ = l.lose(errGone)
	default:
		l.failed(sent, err)
	}
}

// plan sets the time of the next renewal, unless a command sent later than at that moment has been confirmed.
func (l *lease) plan(sent moment, at time.Time) {
	l.mu.Lock()
	defer l.unlock()
	if !l.confirmed.time.After(sent.time) {
		l.planLocked(at)
	}
}

// failed plans the next try after one of no avail: soon, then with growing pauses, but again sooner near the deadline.
func (l *lease) failed(sent moment, err error) {
	l.mu.Lock()
	defer l.unlock()
	if l.confirmed.time.After(sent.time) {
		return
	}
	l.failure = err
	least := l.req.TTL / 60
	pause := min(least<<l.failures, l.req.TTL/6, max(time.Until(l.deadline)/3, least))
	l.failures = min(l.failures+1, 8)
	l.planLocked(time.Now().Add(pause/2 + rand.N(pause/2)))
}

func (w *watchdog) count(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.busy += n
	if w.busy == 0 && w.idle != nil {
		close(w.idle)
		w.idle = nil
	}
}

// wait returns nil when no lease is left, or ctx's error.
func (w *watchdog) wait(ctx context.Context) error {
	w.mu.Lock()
	if w.busy == 0 {
		w.mu.Unlock()
		return nil
	}
	if w.idle == nil {
		w.idle = make(chan struct{})
	}
	idle := w.idle
	w.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
