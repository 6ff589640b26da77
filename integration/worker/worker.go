// Package worker is a process that takes locks and records what it sees: see package history.
package worker

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/integration/history"
)

// Config is what a worker does.
type Config struct {
	ID         int
	Addr       string // where the locks are
	Resource   string // where the registers are: a Redis, or a file for SQLite
	Pool       int    // connections; 0: the default
	Names      []string
	Kept       []string      // names that two goroutines more hold for longer
	Keep       time.Duration // how long Kept are held; 0: for up to two TTLs, at random
	KeptTTL    time.Duration // of their leases; 0: TTL
	TTL        time.Duration
	Clock      bool          // fences by the server's clock
	Cluster    bool          // Addr is a node of a Redis Cluster
	Sentinel   string        // Addr is a Sentinel's; this is the name of the primary
	Handoffs   int           // see lock.WithMaxHandoffs; -1: the default
	Goroutines int           // that take locks
	Stay       time.Duration // the longest that one of Names is held
	Plain      bool          // a client without ContextTimeoutEnabled
	Seed       uint64
}

// variable holds the Config of a process that is a worker.
const variable = "LOCK_WORKER"

// Main runs the worker that the environment asks for, until standard input ends, and tells whether there was one.
func Main() bool {
	text := os.Getenv(variable)
	if text == "" {
		return false
	}
	var c Config
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		panic(err)
	}
	redis.SetLogger(&logging.VoidLogger{})
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	Run(ctx, c, os.Stdout)
	return true
}

// Longest is the TTL of the leases that last longest.
func (c Config) Longest() time.Duration { return max(c.TTL, c.KeptTTL) }

// Env is the environment variable that makes a process a worker.
func (c Config) Env() string {
	text, err := json.Marshal(c)
	if err != nil {
		panic(err)
	}
	return variable + "=" + string(text)
}

// worker is one process.
type worker struct {
	Config
	rec      *history.Recorder
	locker   *lock.Locker
	register register
	store    *watched
	grants   atomic.Int64
	ops      atomic.Int64
}

// duty is what some goroutines do again and again: take one of the names, and hold it for a while.
type duty struct {
	locker      *lock.Locker
	names       []string
	ttl         time.Duration
	least, most time.Duration // that a name is held
}

// Run takes locks until ctx ends.
func Run(ctx context.Context, c Config, out io.Writer) {
	rdb := c.client()
	defer rdb.Close()
	w := &worker{Config: c, rec: history.NewRecorder(c.ID, out)}
	var closeRegister func()
	w.register, closeRegister = openRegister(c.Resource)
	defer closeRegister()
	w.store = &watched{Store: lock.NewStore(rdb), rec: w.rec}
	opts := []lock.Option{lock.WithTTL(c.TTL), lock.WithFencing(), lock.WithLogger(slog.New(slog.DiscardHandler))}
	if c.Clock {
		opts = append(opts, lock.WithClockFencing())
	}
	if c.Handoffs >= 0 {
		opts = append(opts, lock.WithMaxHandoffs(c.Handoffs))
	}
	w.locker = lock.NewWithStore(w.store, opts...)
	watched, done := context.WithCancel(context.Background())
	defer done()
	go w.watchStalls(watched)
	var wg sync.WaitGroup
	begin := func(first, goroutines int, d duty) {
		for i := range goroutines {
			rnd := rand.New(rand.NewPCG(c.Seed, uint64(first+i)))
			wg.Go(func() {
				for ctx.Err() == nil {
					w.turn(ctx, rnd, d)
				}
			})
		}
	}
	begin(0, c.Goroutines, duty{locker: w.locker, names: c.Names, ttl: c.TTL, most: c.Stay})
	if ttl := c.Longest(); len(c.Kept) > 0 {
		begin(c.Goroutines, 2, duty{locker: w.locker.With(lock.WithTTL(ttl)), names: c.Kept, ttl: ttl, least: c.Keep, most: cmp.Or(c.Keep, 2*ttl)})
	}
	wg.Wait()
	end, cancel := context.WithTimeout(context.Background(), 2*c.Longest()+10*time.Second)
	defer cancel()
	if err := w.locker.Wait(end); err != nil {
		panic(fmt.Sprintf("worker %d: something is left: %v", c.ID, err))
	}
}

// watchStalls records when the process could not run for longer than it meant to sleep.
func (w *worker) watchStalls(ctx context.Context) {
	const nap, much = 10 * time.Millisecond, 50 * time.Millisecond
	for ctx.Err() == nil {
		from := history.Now()
		time.Sleep(nap)
		if to := history.Now(); to-from > nap+much {
			w.rec.Add(history.Event{Kind: history.Stalled, Called: from, At: to})
		}
	}
}

func (c *Config) client() redis.UniversalClient {
	o := &redis.UniversalOptions{
		Addrs: []string{c.Addr}, ContextTimeoutEnabled: !c.Plain, DialTimeout: 500 * time.Millisecond, MinRetryBackoff: -1,
		PoolSize: c.Pool, MaxActiveConns: c.Pool, PoolTimeout: 100 * time.Millisecond,
	}
	switch {
	case c.Cluster:
		return redis.NewClusterClient(o.Cluster())
	case c.Sentinel != "":
		o.MasterName = c.Sentinel
		return redis.NewFailoverClient(o.Failover())
	default:
		return redis.NewClient(o.Simple())
	}
}

// turn takes a lock once, if it gets it in time.
func (w *worker) turn(ctx context.Context, rnd *rand.Rand, d duty) {
	name := d.names[rnd.IntN(len(d.names))]
	take := d.locker.Acquire
	if rnd.IntN(8) == 0 {
		take = d.locker.TryAcquire
	}
	waiting, cancel := context.WithTimeout(ctx, time.Duration(rnd.Int64N(int64(4*d.ttl))))
	defer cancel()
	called := history.Now()
	lk, err := take(waiting, name)
	at := history.Now()
	if err != nil {
		if !errors.Is(err, lock.ErrHeld) {
			w.rec.Add(history.Event{Kind: history.Failed, Name: name, Called: called, At: at, Outcome: err.Error()})
			time.Sleep(time.Duration(rnd.IntN(10)) * time.Millisecond)
		}
		return
	}
	w.hold(ctx, lk, name, at, d.ttl, d.least+time.Duration(rnd.Int64N(int64(d.most-d.least)+1)), rnd.IntN(4) == 0)
}

// hold raises the register while it has the lock, and gives it up after a while, or when ctx ends.
func (w *worker) hold(ctx context.Context, lk *lock.Lock, name string, at, ttl, stay time.Duration, careless bool) {
	grant := int(w.grants.Add(1))
	event := func(kind history.Kind, deadline time.Time, at time.Duration, outcome string) {
		w.rec.Add(history.Event{
			Kind: kind, Grant: grant, Name: name, At: at, Outcome: outcome, TTL: ttl,
			Deadline: history.On(deadline), Fence: int64(lk.Fence()),
		})
	}
	w.rec.Add(history.Event{
		Kind: history.Acquired, Grant: grant, Name: name, At: at, TTL: ttl, Sent: w.store.sentFor(name),
		Deadline: history.On(lk.Deadline()), Fence: int64(lk.Fence()),
	})
	stop := context.AfterFunc(lk.Context(), func() {
		at := history.Now()
		if errors.Is(context.Cause(lk.Context()), lock.ErrLost) {
			event(history.Lost, lk.Deadline(), at, "")
		}
	})
	defer stop()
	if value, ok := w.claim(name, lk.Fence()); ok {
		idle := time.NewTimer(stay)
		select {
		case <-idle.C:
		case <-lk.Context().Done():
		case <-ctx.Done():
		}
		idle.Stop()
		if careless || lk.Valid() { // if the holder does not look, the register has to
			w.write(name, lk.Fence(), value+1)
		}
	}
	event(history.Release, lk.Deadline(), history.Now(), "") // the deadline first: a renewal sent after that instant is not in it
	outcome := ""
	if err := lk.Release(context.Background()); err != nil {
		outcome = err.Error()
	}
	event(history.Released, lk.Deadline(), history.Now(), outcome)
}

func (w *worker) claim(name string, f lock.Fence) (value int64, ok bool) {
	e := history.Event{Kind: history.Read, Name: name, Fence: int64(f)}
	outcome := w.operate(e, func(e *history.Event) (outcome string) {
		e.Value, outcome = w.register.claim(context.Background(), name, f)
		value = e.Value
		return outcome
	})
	return value, outcome == history.Accepted
}

func (w *worker) write(name string, f lock.Fence, value int64) {
	e := history.Event{Kind: history.Write, Name: name, Fence: int64(f), Value: value}
	w.operate(e, func(*history.Event) string { return w.register.write(context.Background(), name, f, value) })
}

// operate records an operation before and after.
func (w *worker) operate(e history.Event, do func(e *history.Event) string) (outcome string) {
	e.Op, e.Called = int(w.ops.Add(1)), history.Now()
	e.At, e.Outcome = e.Called, history.Begun
	w.rec.Add(e)
	outcome = do(&e)
	e.At, e.Outcome = history.Now(), outcome
	w.rec.Add(e)
	return outcome
}

// watched is a Store that records confirmed renewals, and when leases were asked for.
type watched struct {
	lock.Store
	rec *history.Recorder

	mu   sync.Mutex               // guards sent
	sent map[string]time.Duration // when the command was sent by which a name was taken last
}

func (s *watched) Acquire(ctx context.Context, r lock.Request) (lock.Reply, error) {
	sent := history.Now()
	reply, err := s.Store.Acquire(ctx, r)
	if err == nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.sent == nil {
			s.sent = map[string]time.Duration{}
		}
		s.sent[nameOf(r)] = sent
	}
	return reply, err
}

func (s *watched) Renew(ctx context.Context, rs []lock.Request, done func(int, lock.Reply, error)) {
	sent := history.Now()
	s.Store.Renew(ctx, rs, func(i int, reply lock.Reply, err error) {
		defer done(i, reply, err) // after the event, which a kill must not lose
		if err == nil {
			s.rec.Add(history.Event{
				Kind: history.Renewed, Name: nameOf(rs[i]), At: history.Now(), Sent: sent, TTL: rs[i].TTL,
				Deadline: sent + rs[i].TTL - Drift(rs[i].TTL),
			})
		}
	})
}

func (s *watched) sentFor(name string) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sent[name]
}

func nameOf(r lock.Request) string { return strings.TrimPrefix(r.Key.Lock, "lock:") }

// Drift is the allowance that the package documents.
func Drift(ttl time.Duration) time.Duration { return ttl/100 + 2*time.Millisecond }
