package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/seed-b640e7e9/lock"
)

// uncontended compares acquire and release of a free lock with the two commands that nobody can do without.
func uncontended(ctx context.Context, c config) error {
	fmt.Printf("## uncontended: acquire and release, %d pairs of rounds of %d\n\n", c.pairs, c.ops)
	fmt.Println("| | client | time / raw, median (95 % interval) | time | allocations, of raw |")
	fmt.Println("|---|---|---|---|---|")
	for _, inline := range []bool{true, false} {
		rdb, err := client(c.url, inline)
		if err != nil {
			return err
		}
		err = uncontendedOn(ctx, c, rdb, inline)
		if closed := rdb.Close(); err == nil {
			err = closed
		}
		if err != nil {
			return err
		}
	}
	fmt.Println()
	return nil
}

func uncontendedOn(ctx context.Context, c config, rdb *redis.Client, inline bool) error {
	name := "default"
	if inline {
		name = "ContextTimeoutEnabled"
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	raw := contestant{"raw", rawPair(ctx, rdb)}
	l := lock.New(rdb)
	for _, a := range []contestant{
		raw,
		{"Acquire, Release", lockPair(ctx, l)},
		{"the same, WithFencing", lockPair(ctx, l.With(lock.WithFencing()))},
		{"Do", func() error { return l.Do(ctx, "bench", func(context.Context) error { return nil }) }},
	} {
		r, err := compare(ctx, c, a, raw)
		if err != nil {
			return err
		}
		fmt.Printf("| %s | %s | %.3f (%.3f - %.3f) | %v | %.1f, %.1f |\n", a.name, name,
			r.ratio.Center, r.ratio.Lo, r.ratio.Hi, r.time.Round(100*time.Nanosecond), r.allocs, r.allocsOf)
	}
	return nil
}

var compareAndDelete = redis.NewScript(`
if redis.call("get", KEYS[1]) == ARGV[1] then
  return redis.call("del", KEYS[1])
end
return 0`)

var errRefused = errors.New("the lock was not free, or not ours")

// rawPair is a lock by hand, without a watchdog, a context or a deadline.
func rawPair(ctx context.Context, rdb *redis.Client) func() error {
	return func() error {
		token := uuid.NewString()
		ok, err := rdb.SetNX(ctx, "lock:raw", token, 10*time.Second).Result()
		if err != nil {
			return err
		}
		n, err := compareAndDelete.Run(ctx, rdb, []string{"lock:raw"}, token).Int()
		if err == nil && (!ok || n != 1) {
			err = errRefused
		}
		return err
	}
}

func lockPair(ctx context.Context, l *lock.Locker) func() error {
	return func() error {
		lk, err := l.Acquire(ctx, "bench")
		if err != nil {
			return err
		}
		return lk.Release(ctx)
	}
}
