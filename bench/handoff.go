package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seed-b640e7e9/lock/bench/internal/report"
)

const (
	handoffsARound = 50
	handoffLimit   = 2 * time.Second  // for a round beside its waits, a tenth of that: some stall
	waits          = time.Millisecond // how long one has waited when the lock is released
)

// relay passes a lock to and fro. Two sessions stand for two processes: each has its own connections, and nothing in
// common. PING is one too, as what everything is compared with.
type relay struct {
	name    string
	round   func(ctx context.Context) ([]time.Duration, error)
	times   []time.Duration
	medians []float64 // of the rounds
	stalls  int
}

// handoff measures the time from the call of release to the return of the next one's acquire, who has been waiting for a
// millisecond.
func handoff(ctx context.Context, c config) (report.Section, error) {
	s := report.Section{
		Title: "Handoff: from the call of release to the next holder",
		Text: fmt.Sprintf("%d rounds of %d handoffs, in random order; who is next has been waiting for a millisecond. PING is measured after the "+
			"same pause, as a machine that has slept takes longer. Two processes are two clients that have nothing in common. The raw row is what go-redis "+
			"needs for it at least: a script that deletes and publishes, a message, and SET NX.", c.rounds, handoffsARound),
	}
	relays, closeAll, err := openRelays(c)
	if err != nil {
		return s, err
	}
	defer closeAll()
	for n := range c.rounds {
		progress("%d of %d rounds", n, c.rounds)
		for _, i := range rand.Perm(len(relays)) {
			if err := relays[i].run(ctx); err != nil {
				return s, fmt.Errorf("%s: %w", relays[i].name, err)
			}
		}
	}
	ping, theirs := relays[len(relays)-1], relays[len(relays)-2]
	t := report.Table{Head: []string{"", "p50", "p99", "round's p50 of PING's", "of rueidislock's, two processes"}}
	chart := report.Chart{Name: "handoff", Title: "From the call of release to the next holder, p50", Y: "ms"}
	bars := report.Series{Name: "p50"}
	for _, r := range relays {
		slices.Sort(r.times)
		name := r.name
		if r.stalls > 0 {
			name += fmt.Sprintf(" (stalled in %d rounds)", r.stalls)
		}
		t.Add(name, brief(at(r.times, 0.5)), brief(at(r.times, 0.99)),
			interval(ratios(r.medians, ping.medians), 2), interval(ratios(r.medians, theirs.medians), 2))
		chart.Labels = append(chart.Labels, r.name)
		bars.Add(0, at(r.times, 0.5).Seconds()*1000)
	}
	chart.Series = []report.Series{bars}
	r := ratios(relays[1].medians, theirs.medians)
	s.Targets = []report.Target{report.AtMost("handoff between processes, p50 of rueidislock's", 0.8, r.Center, interval(r, 2))}
	steps, err := handoffSteps(ctx, c)
	s.Tables, s.Charts = []report.Table{t, steps}, []report.Chart{chart}
	return s, err
}

// openRelays returns, for each peer, one in a process and one between two; PING comes last and rueidislock before it.
func openRelays(c config) (relays []*relay, closeAll func(), err error) {
	var closers []func()
	closeAll = func() {
		for _, f := range closers {
			f()
		}
	}
	for _, name := range []string{us, usFenced, byRueidis} {
		var three [3]*session
		for i := range three {
			if three[i], err = peerOf(name).open(c.url, nil); err != nil {
				closeAll()
				return nil, nil, err
			}
			closers = append(closers, three[i].close)
		}
		relays = append(relays,
			&relay{name: name + ", one process", round: toAndFro(three[0], three[0], handoffsARound, waits)},
			&relay{name: name + ", two processes", round: toAndFro(three[1], three[2], handoffsARound, waits)})
	}
	rdb, err := goRedis(c.url, nil)
	if err != nil {
		closeAll()
		return nil, nil, err
	}
	closers = append(closers, func() { _ = rdb.Close() })
	taker, err := goRedis(c.url, nil)
	if err != nil {
		closeAll()
		return nil, nil, err
	}
	closers = append(closers, func() { _ = taker.Close() })
	raw := &relay{name: "raw, two processes", round: func(ctx context.Context) ([]time.Duration, error) { return rawHandoffs(ctx, rdb, taker) }}
	relays = slices.Insert(relays, len(relays)-2, raw)
	relays = append(relays, &relay{name: "PING", round: func(ctx context.Context) ([]time.Duration, error) { return pings(ctx, rdb) }})
	return relays, closeAll, nil
}

// run runs a round; again if it stalls, as some do now and then, on another lock. If that stalls too the round is left out.
func (r *relay) run(ctx context.Context) error {
	times, err := r.round(ctx)
	if err != nil && ctx.Err() == nil {
		r.stalls++
		times, err = r.round(ctx)
	}
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		r.stalls++
		r.medians = append(r.medians, math.NaN())
		return nil
	}
	if err != nil {
		return err
	}
	slices.Sort(times)
	r.medians = append(r.medians, float64(at(times, 0.5)))
	r.times = append(r.times, times...)
	return nil
}

var deleteAndTell = redis.NewScript(`redis.call('DEL', KEYS[1]) return redis.call('PUBLISH', KEYS[1], '')`)

// rawHandoffs is the least that a handoff takes with go-redis: one deletes the key and tells it, the other hears it and sets
// the key.
func rawHandoffs(ctx context.Context, giver, taker *redis.Client) ([]time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, handoffLimit)
	defer cancel()
	key := "lock:" + newName()
	heard := taker.Subscribe(ctx, key)
	defer heard.Close()
	if _, err := heard.Receive(ctx); err != nil {
		return nil, err
	}
	done := make(chan error, 1)
	var times []time.Duration
	for range handoffsARound {
		go func() {
			_, err := heard.ReceiveMessage(ctx)
			if err == nil {
				err = taker.SetNX(ctx, key, "token", ttl).Err()
			}
			done <- err
		}()
		time.Sleep(waits)
		start := time.Now()
		if err := deleteAndTell.Run(ctx, giver, []string{key}).Err(); err != nil {
			return nil, err
		}
		if err := <-done; err != nil {
			return nil, err
		}
		times = append(times, time.Since(start))
	}
	return times, giver.Del(ctx, key).Err()
}

func pings(ctx context.Context, rdb *redis.Client) ([]time.Duration, error) {
	var times []time.Duration
	for range handoffsARound {
		time.Sleep(waits)
		start := time.Now()
		if err := rdb.Ping(ctx).Err(); err != nil {
			return nil, err
		}
		times = append(times, time.Since(start))
	}
	return times, nil
}

// toAndFro returns what passes a lock of its own between a and b, n times, each time to one who has waited for a while, and
// tells how long each pass took.
func toAndFro(a, b *session, n int, wait time.Duration) func(context.Context) ([]time.Duration, error) {
	type got struct {
		unlock func() error
		at     time.Time
		err    error
	}
	limit := handoffLimit + 2*time.Duration(n)*wait
	return func(ctx context.Context) ([]time.Duration, error) {
		ctx, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		name := newName()
		unlock, err := a.lock(ctx, name)
		if err != nil {
			return nil, err
		}
		var times []time.Duration
		for i := range n {
			next := []*session{b, a}[i%2]
			result := make(chan got, 1)
			go func() {
				u, err := next.lock(ctx, name)
				result <- got{u, time.Now(), err}
			}()
			time.Sleep(wait) // by now it waits
			start := time.Now()
			if err := unlock(); err != nil {
				return nil, err
			}
			g := <-result
			if g.err != nil {
				return nil, g.err
			}
			times = append(times, g.at.Sub(start))
			unlock = g.unlock
		}
		return times, unlock()
	}
}
