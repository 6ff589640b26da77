package main

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/bench/internal/report"
)

// steps of a handoff, and what each begins with.
const (
	released = iota // Release was called
	sent            // its command is about to leave
	heard           // the next one's process has got the message
	tried           // the next one's command is about to leave
	granted         // it was answered
	silenced        // the next one listens no more
	returned        // its Acquire has returned
	instants
)

var stepNames = [instants]string{
	sent:     "Release, up to its command",
	heard:    "the script, and the message to the next one's process",
	tried:    "from the goroutine that reads messages to the one that waits",
	granted:  "the round trip of the next one's command",
	silenced: "unsubscribing",
	returned: "the lease, the Lock and its context",
}

// stopwatch is a Store that notes when it is called.
type stopwatch struct {
	lock.Store
	at *[instants]atomic.Int64 // of the last handoff, in nanoseconds since began
}

var began = time.Now()

func (s stopwatch) mark(i int) { s.at[i].Store(int64(time.Since(began))) }

func (s stopwatch) Release(ctx context.Context, r lock.Request) (lock.Reply, error) {
	s.mark(sent)
	return s.Store.Release(ctx, r)
}

func (s stopwatch) Acquire(ctx context.Context, r lock.Request) (lock.Reply, error) {
	s.mark(tried)
	defer s.mark(granted)
	return s.Store.Acquire(ctx, r)
}

func (s stopwatch) Listen(ctx context.Context, k lock.Key, wake func(string)) (func(), error) {
	stop, err := s.Store.Listen(ctx, k, func(from string) {
		s.mark(heard)
		wake(from)
	})
	if err != nil {
		return nil, err
	}
	return func() {
		stop()
		s.mark(silenced)
	}, nil
}

// handoffSteps measures where the time of a handoff between two processes goes.
func handoffSteps(ctx context.Context, c config) (report.Table, error) {
	n := c.rounds * 10
	t := report.Table{
		Text: fmt.Sprintf("Where the time goes between two processes, in %d handoffs:", n),
		Head: []string{"step", "p50", "p99"},
	}
	var noted [instants]atomic.Int64
	var lockers []*lock.Locker
	for range 2 {
		rdb, err := goRedis(c.url, nil)
		if err != nil {
			return t, err
		}
		defer rdb.Close()
		lockers = append(lockers, lock.NewWithStore(stopwatch{lock.NewStore(rdb), &noted}, lock.WithTTL(ttl)))
	}
	name := newName()
	lk, err := lockers[0].Acquire(ctx, name)
	if err != nil {
		return t, err
	}
	var took [instants][]time.Duration
	for i := range n {
		var next *lock.Lock
		result := make(chan error, 1)
		go func() {
			var err error
			next, err = lockers[(i+1)%2].Acquire(ctx, name)
			noted[returned].Store(int64(time.Since(began)))
			result <- err
		}()
		time.Sleep(waits)
		noted[released].Store(int64(time.Since(began)))
		if err := lk.Release(ctx); err != nil {
			return t, err
		}
		if err := <-result; err != nil {
			return t, err
		}
		lk = next
		for step := released + 1; step < instants; step++ {
			took[step] = append(took[step], time.Duration(noted[step].Load()-noted[step-1].Load()))
		}
	}
	for step := released + 1; step < instants; step++ {
		slices.Sort(took[step])
		t.Add(stepNames[step], brief(at(took[step], 0.5)), brief(at(took[step], 0.99)))
	}
	return t, lk.Release(ctx)
}
