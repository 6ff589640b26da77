package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/bench/internal/report"
)

// pairing is one row: a way to take and release a free lock, and the raw commands that it is compared with.
type pairing struct {
	kind, client string
	a, raw       contestant
}

const (
	obeying = "`ContextTimeoutEnabled`"
	plain   = "default"
)

// uncontended compares acquire and release of a free lock with the two commands that nobody can do without.
func uncontended(ctx context.Context, c config) (report.Section, error) {
	s := report.Section{
		Title: "Uncontended: acquire and release of a free lock, one goroutine",
		Text: fmt.Sprintf("%d pairs of rounds of %d operations, in random order: this one and raw `SetNX` with a compare-and-delete "+
			"script, on the same client (but rueidislock, which brings its own). Ratios are the median of the pairs with its 95 %% "+
			"interval; the first row of each client is raw beside itself, which is the noise. Allocations are counted in the whole process. %s",
			c.pairs, c.ops, instructionsText(c)),
	}
	t := report.Table{Head: []string{"", "client", "time, of raw", "CPU time, of raw", "time", "CPU time", "allocations", "bytes", "instructions"}}
	bars := report.Series{Name: "time, of raw"}
	chart := report.Chart{Name: "uncontended", Title: "Acquire and release of a free lock", Y: "time, of raw commands"}
	cases, closeAll, err := uncontendedCases(ctx, c)
	if err != nil {
		return s, err
	}
	defer closeAll()
	var raw allocated
	for _, k := range cases {
		r, err := compare(ctx, c.pairs, c.ops, k.a, k.raw)
		if stalled(ctx, err) {
			t.Add(k.a.name, k.client, "stalled", "", "", "", "", "", "")
			continue
		}
		if err != nil {
			return s, fmt.Errorf("%s: %w", k.a.name, err)
		}
		heap, err := allocs(c.allocOps(), k.a.op)
		if err != nil {
			return s, err
		}
		t.Add(k.a.name, k.client, interval(r.time, 3), interval(r.cpu, 2), brief(r.each), brief(r.eachCPU),
			fmt.Sprintf("%.1f", heap.count), fmt.Sprintf("%.0f", heap.bytes), instructions(ctx, c, k.kind, k.client))
		if k.client != plain {
			chart.Labels = append(chart.Labels, k.a.name)
			bars.Add(0, r.time.Center)
		}
		switch {
		case k.client == obeying && k.kind == "raw":
			raw = heap
		case k.client == obeying && k.kind == "cancellable":
			s.Targets = []report.Target{
				report.AtMost("uncontended time of raw, `ContextTimeoutEnabled`, cancellable context: upper end", 1.04, r.time.Hi, interval(r.time, 3)),
				report.AtMost("allocations, raw's at most", raw.count, heap.count, fmt.Sprintf("%.1f", heap.count)),
			}
		}
	}
	chart.Series = []report.Series{bars}
	s.Tables, s.Charts = []report.Table{t}, []report.Chart{chart}
	return s, nil
}

// uncontendedCases are the rows: ours on both kinds of clients, and the others.
func uncontendedCases(ctx context.Context, c config) (cases []pairing, closeAll func(), err error) {
	ctx, cancel := context.WithCancel(ctx)
	closers := []func(){cancel}
	closeAll = func() {
		for _, f := range closers {
			f()
		}
	}
	defer func() {
		if err != nil {
			closeAll()
		}
	}()
	var raw contestant
	for _, inline := range []bool{true, false} {
		rdb, err := client(c.url, inline)
		if err != nil {
			return nil, nil, err
		}
		closers = append(closers, func() { _ = rdb.Close() })
		cases = append(cases, oursUncontended(ctx, rdb, inline)...)
		if inline {
			raw = cases[0].raw
		}
	}
	for _, p := range others {
		session, err := p.open(c.url, nil)
		if err != nil {
			return nil, nil, err
		}
		closers = append(closers, session.close)
		name := newName()
		client := obeying
		if p.name == byRueidis {
			client = "rueidis"
		}
		cases = append(cases, pairing{p.name, client, contestant{p.name, limited(ctx, session, name)}, raw})
	}
	return cases, closeAll, nil
}

// limited returns an operation that ends if the peer stalls. A context for each, or one with a deadline, would make a
// difference to some.
func limited(ctx context.Context, s *session, name string) func() error {
	const share = 100 // operations with a context
	n, stop, within := 0, func() {}, ctx
	return func() error {
		if n%share == 0 {
			stop()
			var cancel func()
			within, cancel = context.WithCancel(ctx)
			timer := time.AfterFunc(patience, cancel)
			stop = func() {
				timer.Stop()
				cancel()
			}
		}
		n++
		return s.once(within, name)
	}
}

// stalled tells whether err is the end of a peer's time, and not of the benchmark.
func stalled(ctx context.Context, err error) bool {
	return ctx.Err() == nil && (errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled))
}

func oursUncontended(ctx context.Context, rdb *redis.Client, inline bool) []pairing {
	client := plain
	if inline {
		client = obeying
	}
	raw, bare := contestant{"raw", rawPair(ctx, rdb)}, contestant{"raw", rawPair(context.Background(), rdb)}
	l := lock.New(rdb)
	name := newName()
	return []pairing{
		{"raw", client, raw, raw},
		{"store", client, contestant{"the `Store` alone", storePair(ctx, rdb)}, raw},
		{"background", client, contestant{"background context", lockPair(context.Background(), l, name)}, bare},
		{"cancellable", client, contestant{"cancellable context", lockPair(ctx, l, name)}, raw},
		{"fencing", client, contestant{"the same, `WithFencing`", lockPair(ctx, l.With(lock.WithFencing()), name)}, raw},
		{"do", client, contestant{"`Do`", func() error { return l.Do(ctx, name, func(context.Context) error { return nil }) }}, raw},
	}
}

var compareAndDelete = redis.NewScript(`
if redis.call("get", KEYS[1]) == ARGV[1] then
  return redis.call("del", KEYS[1])
end
return 0`)

var errRefused = errors.New("the lock was not free, or not ours")

// rawPair is a lock by hand, without a watchdog, a context or a deadline.
func rawPair(ctx context.Context, rdb redis.UniversalClient) func() error {
	key := newName()
	return func() error { return rawOnce(ctx, rdb, key) }
}

func rawOnce(ctx context.Context, rdb redis.UniversalClient, key string) error {
	token := uuid.NewString()
	ok, err := rdb.SetNX(ctx, key, token, ttl).Result()
	if err != nil {
		return err
	}
	n, err := compareAndDelete.Run(ctx, rdb, []string{key}, token).Int()
	if err == nil && (!ok || n != 1) {
		err = errRefused
	}
	return err
}

// storePair takes and releases a free lock by the Store alone, without a lease, a watchdog or a Lock.
func storePair(ctx context.Context, rdb *redis.Client) func() error {
	s, name := lock.NewStore(rdb), newName()
	return func() error {
		r := lock.Request{Key: lock.Key{Lock: "lock:" + name}, Token: uuid.NewString(), TTL: ttl, From: name}
		if _, err := s.Acquire(ctx, r); err != nil {
			return err
		}
		_, err := s.Release(ctx, r)
		return err
	}
}

func lockPair(ctx context.Context, l *lock.Locker, name string) func() error {
	return func() error {
		lk, err := l.Acquire(ctx, name)
		if err != nil {
			return err
		}
		return lk.Release(ctx)
	}
}
