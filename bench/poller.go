package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seed-b640e7e9/lock/bench/internal/report"
)

const pollLimit = 5 * time.Second // then the poller gives up

// poller measures how long a client in another language waits, which hears nothing and only asks now and then, while
// eight goroutines of one process want the lock all the time. They pass it on for a second at most; when they release it
// in Redis, nobody is known to wait.
func poller(ctx context.Context, c config) (report.Section, error) {
	tries := c.tries()
	s := report.Section{
		Title: "A client that polls, against a busy process",
		Text: fmt.Sprintf("`SET NX` now and then, as locks in other languages do it, while 8 goroutines of one process want the lock all the time; "+
			"%d times each, giving up after %v.", tries, pollLimit),
	}
	t := report.Table{Head: []string{"asks every", "got in", "wait p50", "p90", "max"}}
	for _, every := range []time.Duration{time.Millisecond, 10 * time.Millisecond, 100 * time.Millisecond} {
		progress("every %v", every)
		waits, err := pollAgainst(ctx, c.url, every, tries)
		if err != nil {
			return s, err
		}
		slices.Sort(waits)
		t.Add(every.String(), fmt.Sprintf("%d of %d", len(waits), tries), brief(at(waits, 0.5)), brief(at(waits, 0.9)), brief(at(waits, 1)))
	}
	s.Tables = []report.Table{t}
	return s, nil
}

// pollAgainst returns how long the poller waited, each time that it got in.
func pollAgainst(ctx context.Context, url string, every time.Duration, tries int) ([]time.Duration, error) {
	s, err := peerOf(us).open(url, nil)
	if err != nil {
		return nil, err
	}
	defer s.close()
	rdb, err := goRedis(url, nil)
	if err != nil {
		return nil, err
	}
	defer rdb.Close()
	name := newName()
	busy, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for busy.Err() == nil {
				if unlock, err := s.lock(busy, name); err == nil {
					_ = unlock()
				}
			}
		})
	}
	defer wg.Wait()
	defer stop()
	var waits []time.Duration
	for range tries {
		wait, in, err := pollOnce(ctx, rdb, keyPrefix+name, every)
		if err != nil {
			return nil, err
		}
		if in {
			waits = append(waits, wait)
		}
	}
	return waits, nil
}

// pollOnce waits until the process has the lock, and then for it.
func pollOnce(ctx context.Context, rdb *redis.Client, key string, every time.Duration) (wait time.Duration, in bool, err error) {
	for ctx.Err() == nil && rdb.Exists(ctx, key).Val() == 0 {
		time.Sleep(time.Millisecond) // nobody has told the process that the poller has gone
	}
	for start := time.Now(); time.Since(start) < pollLimit; time.Sleep(every) {
		ok, err := rdb.SetNX(ctx, key, "poller", ttl).Result()
		if err != nil {
			return 0, false, err
		}
		if ok {
			return time.Since(start), true, rdb.Del(ctx, key).Err()
		}
	}
	return 0, false, nil
}
