package main

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/seed-b640e7e9/lock"
)

// holding keeps many locks with one Locker and reports what that costs, and whether any was lost.
func holding(ctx context.Context, c config) error {
	rdb, err := client(c.url, true)
	if err != nil {
		return err
	}
	defer rdb.Close()
	l := lock.New(rdb, lock.WithTTL(c.ttl))
	warm, err := l.Acquire(ctx, "holding:warm")
	if err != nil {
		return err
	}
	if err := warm.Release(ctx); err != nil {
		return err
	}
	before, goroutines := heap(), runtime.NumGoroutine()
	held := make([]*lock.Lock, 0, c.locks)
	for i := range c.locks {
		lk, err := l.Acquire(ctx, fmt.Sprintf("holding:%d", i))
		if err != nil {
			return err
		}
		held = append(held, lk)
	}
	bytes := (heap() - before) / float64(c.locks)
	cpu, most := cpuTime(), 0
	for end := time.Now().Add(c.hold); time.Now().Before(end) && ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
		most = max(most, runtime.NumGoroutine())
		fmt.Fprintf(os.Stderr, "\r%v left, %d goroutines ", time.Until(end).Round(time.Second), runtime.NumGoroutine())
	}
	fmt.Fprint(os.Stderr, "\r\033[K")
	used := cpuTime() - cpu
	lost := 0
	for _, lk := range held {
		if !lk.Valid() {
			lost++
		}
		if err := lk.Release(ctx); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}
	fmt.Printf("## holding %d locks, TTL %v, for %v\n\n", c.locks, c.ttl, c.hold)
	fmt.Println("| lost | bytes a lock | goroutines before, at most | client CPU, of one core |")
	fmt.Println("|---|---|---|---|")
	fmt.Printf("| %d | %.0f | %d, %d | %.1f %% |\n\n", lost, bytes, goroutines, most, 100*used.Seconds()/c.hold.Seconds())
	return l.Wait(ctx)
}

func heap() float64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}

func cpuTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
