package lock

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/seed-b640e7e9/lock/internal/clock"
	"github.com/seed-b640e7e9/lock/internal/due"
	"github.com/seed-b640e7e9/lock/internal/wait"
)

// watchdog renews the leases of a Locker and its variants, and raises the alarm at their deadlines. While it waits
// there are two timers and no goroutine. When a lease is due, it is renewed together with all that are due about then,
// in pipelines that run side by side and that nothing else waits for. A renewal that gets no answer is sent again, on
// another connection, long before the deadline.
type watchdog struct {
	store    Store
	began    time.Time
	room     *wait.Room[kind, turn]
	renewals *due.Queue[*lease]
	alarms   *due.Queue[*lease]

	mu   sync.Mutex    // guards all below
	busy int           // held leases, those who wait for one, and commands under way
	idle chan struct{} // closed when busy becomes 0; nil while nobody waits for that
}

const (
	slack = time.Millisecond      // how much earlier than planned a lease is renewed to go with others
	grid  = 50 * time.Millisecond // renewals are planned for multiples of it: see renewAt
	chunk = 500                   // renewals in a pipeline

	maxAnswer = time.Minute // how long the answer to a renewal is waited for, if the lease does not end before
)

func newWatchdog(s Store, room *wait.Room[kind, turn]) *watchdog {
	w := &watchdog{store: s, began: time.Now(), room: room}
	w.renewals = due.New(slack, w.renewAll)
	w.alarms = due.New(0, w.alarm)
	return w
}

// alarm tells the holders of leases whose deadline has come; then the room, of all that were lost; and when all have been
// told it reports, as a log handler may take its time, or ask the Lock.
func (w *watchdog) alarm(ls []*lease) {
	suspended := clock.AtMost()
	for _, l := range ls {
		l.mu.Lock()
		l.checkLocked(suspended)
		l.mu.Unlock()
	}
	var reports []func()
	for _, l := range ls {
		if report := l.reported(); report != nil {
			reports = append(reports, report)
			if !l.apart {
				w.room.Pass(l.key.Lock, turn{})
			}
		}
	}
	for _, report := range reports {
		report()
	}
}

// reported returns what logs the loss of l, once; nil if it is not lost.
func (l *lease) reported() func() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dog.alarms.Remove(&l.alarm)
	if !l.unsaid {
		if l.ended == nil {
			l.dog.alarms.Put(&l.alarm, l.deadline) // it has moved meanwhile
		}
		return nil
	}
	l.unsaid = false
	logger, err, report := orDefault(l.holder.logger), l.ended, "lock: lost"
	if err == errForgotten {
		report = "lock: no longer renewed"
	}
	return func() { logger.Warn(report, "name", l.name, "error", err) }
}

// renewAll renews leases of one TTL together, as it says how long an answer may take.
func (w *watchdog) renewAll(ls []*lease) {
	slices.SortStableFunc(ls, func(a, b *lease) int { return int(a.kind.ttl - b.kind.ttl) })
	for len(ls) > 0 {
		n := 1
		for n < len(ls) && n < chunk && ls[n].kind.ttl == ls[0].kind.ttl {
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
	sent, suspended := now(), clock.AtMost()
	var live []*lease
	var rs []Request
	for _, l := range ls {
		if r, ok := l.renewal(sent.time, suspended); ok {
			live, rs = append(live, l), append(rs, r)
		}
	}
	if len(live) == 0 {
		return
	}
	ctx, cancel := context.WithDeadline(context.Background(), sent.time.Add(min(ls[0].kind.ttl, maxAnswer)))
	defer cancel()
	w.store.Renew(ctx, rs, func(i int, _ Reply, err error) { live[i].renewed(sent, rs[i].TTL, err) })
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

func (w *watchdog) idleNow() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.busy == 0
}

// wait returns nil when no lease is left and nobody waits for one, or ctx's error.
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
