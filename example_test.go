package lock_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/seed-b640e7e9/lock"
)

// newClient stands for the client that a service has already. Here it talks to a Redis in memory.
func newClient() (rdb *redis.Client, stop func()) {
	server := miniredis.NewMiniRedis()
	if err := server.Start(); err != nil {
		panic(err)
	}
	rdb = redis.NewClient(&redis.Options{Addr: server.Addr(), ContextTimeoutEnabled: true})
	return rdb, func() {
		_ = rdb.Close()
		server.Close()
	}
}

func Example() {
	rdb, stop := newClient()
	defer stop()
	locker := lock.New(rdb)

	err := locker.Do(context.Background(), "account:42", func(ctx context.Context) error {
		// Only one process at a time is here. Pass ctx on: it ends when the lock is lost.
		fmt.Println("moving money")
		return nil
	})
	switch {
	case errors.Is(err, lock.ErrLost):
		fmt.Println("another may have been there before the end:", err)
	case err != nil:
		fmt.Println("not done:", err)
	default:
		fmt.Println("done")
	}
	// Output:
	// moving money
	// done
}

func ExampleDo() {
	rdb, stop := newClient()
	defer stop()
	before := lock.Default()
	lock.SetDefault(lock.New(rdb)) // once, in main
	defer lock.SetDefault(before)

	err := lock.Do(context.Background(), "tenant:7", func(ctx context.Context) error {
		fmt.Println("migrating")
		return nil
	})
	fmt.Println(err)
	// Output:
	// migrating
	// <nil>
}

func ExampleLocker_Do() {
	rdb, stop := newClient()
	defer stop()

	// Wait for two seconds at most, then work for thirty at most.
	locker := lock.New(rdb, lock.WithMaxWait(2*time.Second))
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()

	err := locker.Do(ctx, "report", func(ctx context.Context) error {
		held, _ := lock.FromContext(ctx)
		fmt.Println("holding", held.Name())
		return locker.Do(ctx, "report", func(context.Context) error { return nil })
	})
	fmt.Println(errors.Is(err, lock.ErrReentrant))
	// Output:
	// holding report
	// true
}

func ExampleLocker_Acquire() {
	rdb, stop := newClient()
	defer stop()
	locker := lock.New(rdb)

	// The timeout bounds the waiting. It does not end the lock.
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	held, err := locker.Acquire(ctx, "upload")
	if err != nil {
		fmt.Println("not acquired:", err)
		return
	}
	defer held.Release(ctx) // right even if ctx has ended

	ctx, cancel = context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	_, err = locker.Acquire(ctx, "upload")
	fmt.Println(errors.Is(err, lock.ErrHeld), errors.Is(err, context.DeadlineExceeded))
	// Output:
	// true true
}

// A job that is scheduled on every machine of a fleet, and is to run on one. TryDo alone means one at a time; once in a
// period takes WithMinHold too, longer than the clocks of the machines differ and shorter than the period.
func ExampleLocker_TryDo() {
	rdb, stop := newClient()
	defer stop()

	run := func(machine string) {
		locker := lock.New(rdb, lock.WithMinHold(30*time.Second))
		err := locker.TryDo(context.Background(), "nightly", func(ctx context.Context) error {
			fmt.Println("running on", machine)
			return nil
		})
		switch {
		case errors.Is(err, lock.ErrHeld):
			fmt.Println("nothing to do on", machine)
		case err != nil:
			fmt.Println("alarm:", err) // Redis is down, or the job failed
		}
	}
	run("a")
	run("b")
	// Output:
	// running on a
	// nothing to do on b
}

// What no lock can prevent, a holder that was paused and goes on too late, a fence makes harmless.
func Example_fencing() {
	rdb, stop := newClient()
	defer stop()
	ctx := context.Background()
	locker := lock.New(rdb, lock.WithFencing())

	old, err := locker.Acquire(ctx, "config")
	if err != nil {
		fmt.Println(err)
		return
	}
	rdb.Del(ctx, "lock:config") // old's lease has ended, but old does not know

	current, err := locker.Acquire(ctx, "config")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer current.Release(ctx)

	fmt.Println(current.Fence().Set(ctx, rdb, "settings", "new"))
	err = old.Fence().Set(ctx, rdb, "settings", "old")
	fmt.Println(errors.Is(err, lock.ErrStale), rdb.Get(ctx, "settings").Val())
	_ = old.Release(ctx) // tells of the loss
	// Output:
	// <nil>
	// true new
}

func ExampleLock_Context() {
	rdb, stop := newClient()
	defer stop()
	ctx := context.Background()
	locker := lock.New(rdb, lock.WithTTL(time.Second))

	held, err := locker.Acquire(ctx, "stream")
	if err != nil {
		fmt.Println(err)
		return
	}
	rdb.Del(ctx, "lock:stream") // somebody flushes the wrong database

	<-held.Context().Done() // within a third of the TTL
	fmt.Println(errors.Is(context.Cause(held.Context()), lock.ErrLost))
	fmt.Println(errors.Is(held.Release(ctx), lock.ErrLost))
	// Output:
	// true
	// true
}
