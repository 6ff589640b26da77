package main

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seed-b640e7e9/lock"
)

// holdJob is what a child does that holds locks.
type holdJob struct {
	URL       string
	Locks     int
	TTL, Hold time.Duration
	Timed     bool // tell how late renewals are
}

// held is what a child tells.
type held struct {
	Lost                int
	Bytes, Bare         float64 // a lock; what its key and its token have
	Before, Usual, Most int     // goroutines: before any lock, at the median, and at most
	CPU, ServerCPU      float64 // of one core
	Renewals            float64 // a second
	Late                []time.Duration
}

const (
	tokenBytes = 36 // of a UUID
	keyPrefix  = "lock:"
)

func (j holdJob) run() (any, error) {
	ctx := context.Background()
	rdb, err := client(j.URL, true)
	if err != nil {
		return nil, err
	}
	defer rdb.Close()
	store := lock.NewStore(rdb)
	late := &lateStore{Store: store, third: j.TTL / 3}
	if j.Timed {
		store = late
	}
	h := held{}
	if err := j.hold(ctx, lock.NewWithStore(store, lock.WithTTL(j.TTL)), rdb, &h); err != nil {
		return nil, err
	}
	if slices.Sort(late.late); len(late.late) > 0 {
		for i := range 101 { // percentiles
			h.Late = append(h.Late, at(late.late, float64(i)/100))
		}
	}
	return h, nil
}

func (j holdJob) hold(ctx context.Context, l *lock.Locker, rdb *redis.Client, h *held) error {
	prefix := newName()
	names, locks := make([]string, j.Locks), make([]*lock.Lock, j.Locks)
	for i := range names {
		names[i] = fmt.Sprint(prefix, ":", i)
		h.Bare += float64(len(keyPrefix)+len(names[i])+tokenBytes) / float64(j.Locks)
	}
	if err := repeat(100, lockPair(ctx, l, prefix)); err != nil { // warm-up
		return err
	}
	before := heap()
	h.Before = runtime.NumGoroutine()
	for i, name := range names {
		lk, err := l.Acquire(ctx, name)
		if err != nil {
			return err
		}
		locks[i] = lk
	}
	bytes := heap() - before
	if err := j.observe(ctx, rdb, h); err != nil {
		return err
	}
	h.Bytes = max(bytes, heap()-before) / float64(j.Locks)
	for _, lk := range locks {
		if !lk.Valid() {
			h.Lost++
		} else if err := lk.Release(ctx); err != nil {
			return err
		}
	}
	runtime.KeepAlive(names)
	return l.Wait(ctx)
}

// observe looks at the process and the server while time passes.
func (j holdJob) observe(ctx context.Context, rdb *redis.Client, h *held) error {
	before, err := usedNow(ctx, rdb)
	if err != nil {
		return err
	}
	var goroutines []int
	for end := time.Now().Add(j.Hold); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		goroutines = append(goroutines, runtime.NumGoroutine())
	}
	after, err := usedNow(ctx, rdb)
	if err != nil {
		return err
	}
	slices.Sort(goroutines)
	h.Usual, h.Most = goroutines[len(goroutines)/2], goroutines[len(goroutines)-1]
	took := after.at.Sub(before.at).Seconds()
	h.CPU = (after.cpu - before.cpu).Seconds() / took
	h.ServerCPU = (after.server - before.server) / took
	h.Renewals = (after.scripts - before.scripts) / took
	return nil
}

// used is what was used up to an instant.
type used struct {
	at              time.Time
	cpu             time.Duration
	server, scripts float64 // seconds of the server's CPU; scripts that it ran
}

func usedNow(ctx context.Context, rdb *redis.Client) (used, error) {
	u := used{at: time.Now(), cpu: cpuTime()}
	user, err := infoNumber(ctx, rdb, "cpu", "used_cpu_user")
	if err != nil {
		return u, err
	}
	system, err := infoNumber(ctx, rdb, "cpu", "used_cpu_sys")
	if err != nil {
		return u, err
	}
	text, err := rdb.Info(ctx, "commandstats").Result()
	if err != nil {
		return u, err
	}
	u.server = user + system
	if _, err := fmt.Sscanf(field(text, "cmdstat_evalsha"), "calls=%f,", &u.scripts); err != nil {
		return u, fmt.Errorf("commandstats: %w", err)
	}
	return u, nil
}
