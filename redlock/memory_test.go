package redlock_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/seed-b640e7e9/lock"
)

// memory is a node in memory, in virtual time: it does what the scripts do, and it can be stopped, started with and
// without its data, and have a clock that gains or loses.
type memory struct {
	rate  float64                               // of its clock
	eaten func(ttl time.Duration) time.Duration // how much earlier than asked keys end; nil: not
	blind bool                                  // it writes fences back whoever holds the key

	mu       sync.Mutex // guards all below
	began    time.Time
	leases   map[string]memoryLease
	counters map[string]lock.Fence
	ears     map[string]map[*func(string)]bool
	down     bool
	stopped  bool
	queue    []func() // what has come while it was stopped
	takes    int      // how often it was asked for a lock
}

type memoryLease struct {
	token string
	until time.Duration // by the node's clock
}

func newMemory(rate float64) *memory {
	m := &memory{rate: rate, began: time.Now(), ears: map[string]map[*func(string)]bool{}}
	m.wipe()
	return m
}

// wipe loses all data.
func (m *memory) wipe() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.leases, m.counters = map[string]memoryLease{}, map[string]lock.Fence{}
}

// crash ends what is under way; until start nobody can reach the node.
func (m *memory) crash() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.down, m.stopped, m.queue = true, false, nil
}

func (m *memory) start() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.down = false
}

// stop and goOn are SIGSTOP and SIGCONT: what comes in between is done then.
func (m *memory) stop() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.stopped = !m.down
}

func (m *memory) goOn() {
	m.mu.Lock()
	queue := m.queue
	m.stopped, m.queue = false, nil
	m.mu.Unlock()
	for _, f := range queue {
		f()
	}
}

// arrive does f at the node: now, when it goes on, or never.
func (m *memory) arrive(f func()) {
	m.mu.Lock()
	if m.stopped {
		m.queue = append(m.queue, f)
	}
	run := !m.stopped && !m.down
	m.mu.Unlock()
	if run {
		f()
	}
}

func (m *memory) refuses() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.down
}

// clock is the node's own.
func (m *memory) clock() time.Duration {
	return time.Duration(float64(time.Since(m.began)) * (1 + m.rate))
}

func (m *memory) holderLocked(key string) (memoryLease, bool) {
	l, ok := m.leases[key]
	return l, ok && m.clock() < l.until
}

// holder returns the token of a name.
func (m *memory) holder(name string) (string, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l, ok := m.holderLocked("lock:" + name)
	return l.token, ok
}

func (m *memory) setLocked(r lock.Request) {
	ttl := r.TTL
	if m.eaten != nil {
		ttl -= m.eaten(ttl)
	}
	l := memoryLease{r.Token, m.clock() + ttl}
	if old, ok := m.holderLocked(r.Key.Lock); ok {
		l.until = max(l.until, old.until)
	}
	m.leases[r.Key.Lock] = l
}

func (m *memory) raiseLocked(r lock.Request, by int) lock.Fence {
	c := max(m.counters[r.Key.Fence], r.Floor)
	if r.Fence == lock.FenceClock {
		c = max(c, lock.Fence(time.Now().UnixMicro())-1) // clocks that agree, although they are not equally fast
	}
	m.counters[r.Key.Fence] = c + lock.Fence(by)
	return m.counters[r.Key.Fence]
}

func (m *memory) acquire(r lock.Request) (lock.Reply, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.takes++
	held, ok := m.holderLocked(r.Key.Lock)
	if ok && held.token != r.Token {
		if !r.Again && r.Fence == lock.FenceOff {
			return lock.Reply{}, lock.ErrHeld
		}
		return lock.Reply{Remaining: held.until - m.clock(), Holder: "hash of " + held.token}, lock.ErrHeld
	}
	reply := lock.Reply{Own: ok}
	if r.Fence != lock.FenceOff {
		if reply.Fence = m.counters[r.Key.Fence]; !ok {
			r.Floor = 0
			reply.Fence = m.raiseLocked(r, r.Count+1)
		}
	}
	m.setLocked(r)
	return reply, nil
}

func (m *memory) renew(r lock.Request) (lock.Reply, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.blind && r.Floor > 0 && r.Count == 0 {
		m.counters[r.Key.Fence] = r.Floor
		return lock.Reply{Fence: r.Floor}, nil
	}
	if held, ok := m.holderLocked(r.Key.Lock); !ok || held.token != r.Token {
		return lock.Reply{}, lock.ErrLost
	}
	var reply lock.Reply
	if r.Fence != lock.FenceOff && (r.Count > 0 || r.Floor > 0) {
		reply.Fence = m.raiseLocked(r, r.Count)
	}
	reply.Listeners = len(m.ears[r.Key.Lock])
	m.setLocked(r)
	return reply, nil
}

func (m *memory) release(r lock.Request) (lock.Reply, error) {
	m.mu.Lock()
	held, ok := m.holderLocked(r.Key.Lock)
	if !ok || held.token != r.Token {
		m.mu.Unlock()
		return lock.Reply{}, lock.ErrLost
	}
	delete(m.leases, r.Key.Lock)
	var ears []func(string)
	if !r.Quiet {
		for ear := range m.ears[r.Key.Lock] {
			ears = append(ears, *ear)
		}
	}
	m.mu.Unlock()
	for _, ear := range ears {
		ear(r.From)
	}
	return lock.Reply{Listeners: len(ears)}, nil
}

// link is the way of one process to a node: a Store whose messages take their time, and get lost.
type link struct {
	*memory
	mu    sync.Mutex // guards all below
	rnd   *rand.Rand
	least time.Duration // each message takes that
	slow  time.Duration // and up to that in addition
	lose  float64       // and is lost with this probability

	refusal error         // of all that is asked
	renewal time.Duration // how long the request of a renewal takes in addition
	taking  time.Duration // how long the request of an acquire takes in addition
	busy    int           // calls under way
	most    int           // the most there were
}

var _ lock.Store = (*link)(nil)

func (l *link) set(slow time.Duration, lose float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.slow, l.lose = slow, lose
}

// message returns how long the next message takes, or that it gets lost.
func (l *link) message() (takes time.Duration, lost bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.least + time.Duration(l.rnd.Int64N(int64(l.slow)+1)), l.rnd.Float64() < l.lose
}

var errRefused = errors.New("connection refused")

func (l *link) enter(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.busy += n
	l.most = max(l.most, l.busy)
}

// do sends f to the node and waits for what it says, for as long as limit and ctx let it.
func (l *link) do(ctx context.Context, limit, extra time.Duration, f func() (lock.Reply, error)) (lock.Reply, error) {
	if ctx.Err() != nil {
		return lock.Reply{}, ctx.Err()
	}
	l.mu.Lock()
	refusal := l.refusal
	l.mu.Unlock()
	if refusal != nil {
		return lock.Reply{}, refusal
	}
	if l.refuses() {
		return lock.Reply{}, errRefused
	}
	l.enter(1)
	defer l.enter(-1)
	type answer struct {
		reply lock.Reply
		err   error
	}
	answers := make(chan answer, 1)
	after := func(extra time.Duration, then func()) {
		if takes, lost := l.message(); !lost {
			time.AfterFunc(takes+extra, then)
		}
	}
	after(extra, func() {
		l.arrive(func() {
			reply, err := f()
			after(0, func() { answers <- answer{reply, err} })
		})
	})
	if limit == 0 {
		limit = time.Second
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case a := <-answers:
		return a.reply, a.err
	case <-timer.C:
	case <-ctx.Done():
	}
	return lock.Reply{}, fmt.Errorf("%w: no answer", lock.ErrUnknown)
}

func (l *link) Acquire(ctx context.Context, r lock.Request) (lock.Reply, error) {
	l.mu.Lock()
	taking := l.taking
	l.mu.Unlock()
	return l.do(ctx, r.Limit, taking, func() (lock.Reply, error) { return l.acquire(r) })
}

func (l *link) Release(ctx context.Context, r lock.Request) (lock.Reply, error) {
	return l.do(ctx, r.Limit, 0, func() (lock.Reply, error) { return l.release(r) })
}

func (l *link) Renew(ctx context.Context, rs []lock.Request, done func(int, lock.Reply, error)) {
	for i, r := range rs {
		reply, err := l.do(ctx, time.Hour, l.renewal, func() (lock.Reply, error) { return l.renew(r) })
		done(i, reply, err)
	}
}

// Listen hears what the node tells, late or never.
func (l *link) Listen(ctx context.Context, key lock.Key, wake func(from string)) (func(), error) {
	ear := func(from string) {
		if takes, lost := l.message(); !lost {
			time.AfterFunc(takes, func() { wake(from) })
		}
	}
	_, err := l.do(ctx, 0, 0, func() (lock.Reply, error) {
		l.memory.mu.Lock()
		defer l.memory.mu.Unlock()
		if l.ears[key.Lock] == nil {
			l.ears[key.Lock] = map[*func(string)]bool{}
		}
		l.ears[key.Lock][&ear] = true
		return lock.Reply{}, nil
	})
	stop := func() {
		l.memory.mu.Lock()
		defer l.memory.mu.Unlock()
		delete(l.ears[key.Lock], &ear)
	}
	if err != nil {
		stop()
		return nil, err
	}
	return stop, nil
}

func (l *link) Wait(context.Context) error { return nil }

func (l *link) tune(f func(l *link)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f(l)
}
