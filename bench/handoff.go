package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"time"
)

const handoffsARound = 50

// handoff measures the time from the call of release to the return of the next one's acquire, who has been waiting for a
// millisecond. Two sessions stand for two processes: each has its own connections, and nothing in common.
func handoff(ctx context.Context, c config) error {
	addr, err := address(c.url)
	if err != nil {
		return err
	}
	type side struct {
		name string
		a, b *session
	}
	var sides []side
	for _, p := range []peer{find("lock"), find("lock, fencing"), find("rueidislock")} {
		var three [3]*session
		one, two := newKey(), newKey()
		for i, key := range []string{one, two, two} {
			if three[i], err = p.open(addr, key, &wire{}); err != nil {
				return err
			}
			defer three[i].close()
		}
		sides = append(sides, side{p.name + ", one process", three[0], three[0]}, side{p.name + ", two processes", three[1], three[2]})
	}
	rdb := goRedis(addr, &wire{})
	defer rdb.Close()
	all := make([][]float64, len(sides)+1) // and the last is PING
	medians := make([][]float64, len(all))
	stalls := make([]int, len(all))
	for round := range c.rounds {
		if round%10 == 0 {
			fmt.Fprintf(os.Stderr, "\rhandoffs: %d of %d rounds ", round, c.rounds)
		}
		for _, i := range rand.Perm(len(all)) {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			var times []float64
			if i == len(sides) {
				for range handoffsARound {
					time.Sleep(time.Millisecond) // as before each handoff: a machine that slept takes longer
					start := time.Now()
					if err := rdb.Ping(ctx).Err(); err != nil {
						return err
					}
					times = append(times, float64(time.Since(start)))
				}
			} else if times, err = toAndFro(ctx, sides[i].a, sides[i].b); err != nil && ctx.Err() == nil {
				stalls[i]++ // some do now and then; another try, after the key has expired
				times, err = toAndFro(ctx, sides[i].a, sides[i].b)
			}
			if err != nil {
				return fmt.Errorf("handoff %d: %w", i, err)
			}
			slices.Sort(times)
			medians[i] = append(medians[i], times[len(times)/2])
			all[i] = append(all[i], times...)
		}
	}
	fmt.Fprint(os.Stderr, "\r\033[K")
	fmt.Printf("## handoff: %d rounds of %d\n\n", c.rounds, handoffsARound)
	fmt.Println("| | p50 | p99 | round's p50 / PING, median (95 % interval) | / rueidislock, two processes |\n|---|---|---|---|---|")
	against := func(i, j int) string {
		ratios := make([]float64, c.rounds)
		for k := range ratios {
			ratios[k] = medians[i][k] / medians[j][k]
		}
		s := median(ratios)
		return fmt.Sprintf("%.2f (%.2f - %.2f)", s.Center, s.Lo, s.Hi)
	}
	for i, times := range all {
		name := "PING"
		if i < len(sides) {
			name = sides[i].name
		}
		if stalls[i] > 0 {
			name += fmt.Sprintf(" (stalled in %d rounds)", stalls[i])
		}
		slices.Sort(times)
		at := func(q float64) time.Duration {
			return time.Duration(times[int(q*float64(len(times)-1))]).Round(100 * time.Nanosecond)
		}
		fmt.Printf("| %s | %v | %v | %s | %s |\n", name, at(0.5), at(0.99), against(i, len(sides)), against(i, len(sides)-1))
	}
	fmt.Println()
	return nil
}

// toAndFro passes the lock between a and b, and returns how long each pass took.
func toAndFro(ctx context.Context, a, b *session) ([]float64, error) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	unlock, err := a.lock(ctx)
	if err != nil {
		return nil, err
	}
	type got struct {
		unlock func() error
		at     time.Time
		err    error
	}
	var times []float64
	for i := range handoffsARound {
		next := []*session{b, a}[i%2]
		result := make(chan got, 1)
		go func() {
			u, err := next.lock(ctx)
			result <- got{u, time.Now(), err}
		}()
		time.Sleep(time.Millisecond) // by now it waits
		start := time.Now()
		if err := unlock(); err != nil {
			return nil, err
		}
		g := <-result
		if g.err != nil {
			return nil, g.err
		}
		times = append(times, float64(g.at.Sub(start)))
		unlock = g.unlock
	}
	return times, unlock()
}
