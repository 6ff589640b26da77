package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"
)

// poller measures how long a client in another language waits, which hears nothing and only asks now and then, while
// eight goroutines of one process want the lock all the time. They pass it on for a second at most; when they release it
// in Redis, nobody is known to wait.
func poller(ctx context.Context, c config) error {
	addr, err := address(c.url)
	if err != nil {
		return err
	}
	const times = 20
	fmt.Printf("## poller: SET NX now and then, against 8 goroutines of one process, %d times each\n\n", times)
	fmt.Println("| asks every | got in | wait p50 | p90 | max |\n|---|---|---|---|---|")
	for _, every := range []time.Duration{time.Millisecond, 10 * time.Millisecond, 100 * time.Millisecond} {
		fmt.Fprintf(os.Stderr, "\r\033[Kpoller: every %v ", every)
		waits, err := pollAgainst(ctx, addr, every, times)
		if err != nil {
			return err
		}
		fmt.Fprint(os.Stderr, "\r\033[K")
		slices.Sort(waits)
		at := func(q float64) time.Duration {
			if len(waits) == 0 {
				return 0
			}
			return waits[int(q*float64(len(waits)-1))].Round(time.Millisecond)
		}
		fmt.Printf("| %v | %d of %d | %v | %v | %v |\n", every, len(waits), times, at(0.5), at(0.9), at(1))
	}
	fmt.Println()
	return nil
}

const pollLimit = 5 * time.Second // then the poller gives up

// pollAgainst returns how long the poller waited, each time that it got in.
func pollAgainst(ctx context.Context, addr string, every time.Duration, times int) ([]time.Duration, error) {
	key := newKey()
	s, err := find("lock").open(addr, key, &wire{})
	if err != nil {
		return nil, err
	}
	defer s.close()
	rdb := goRedis(addr, &wire{})
	defer rdb.Close()
	busy, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for busy.Err() == nil {
				if unlock, err := s.lock(busy); err == nil {
					_ = unlock()
				}
			}
		})
	}
	defer wg.Wait()
	defer stop()
	var waits []time.Duration
	for range times {
		for ctx.Err() == nil && rdb.Exists(ctx, "lock:"+key).Val() == 0 {
			time.Sleep(time.Millisecond) // until the process is back: nobody has told it that the poller has gone
		}
		start := time.Now()
		for time.Since(start) < pollLimit {
			ok, err := rdb.SetNX(ctx, "lock:"+key, "poller", ttl).Result()
			if err != nil {
				return nil, err
			}
			if ok {
				waits = append(waits, time.Since(start))
				if err := rdb.Del(ctx, "lock:"+key).Err(); err != nil {
					return nil, err
				}
				break
			}
			time.Sleep(every)
		}
	}
	return waits, nil
}
