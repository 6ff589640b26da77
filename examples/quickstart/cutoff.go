package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/seed-b640e7e9/lock"
)

const (
	ledgerLock = "ledger" // the name that A and B lock
	ledgerKey  = "ledger" // what they write, after the prefix

	leaseTTL    = time.Second            // short, so that there is not much to wait for
	beforeCut   = 500 * time.Millisecond // so that the lease has been renewed when the network fails
	maxAttempts = 3
)

// cutOff is the third part. A holder, A, is cut off from Redis: it must hear of it before B gets the lock. Then A
// writes nevertheless, as a process might that has been paused: it must be refused, as B has a newer fence.
func (d *demo) cutOff(ctx context.Context) error {
	d.say("\n3. A holder is cut off from Redis: locks of %v, unless renewed", leaseTTL)
	for attempt := 1; ; attempt++ {
		s := &scene{demo: d, begin: time.Now(), key: d.prefix + ledgerKey}
		if err := s.play(ctx); err != nil {
			return err
		}
		margin := s.entered.Sub(s.told)
		if margin > 0 {
			d.say("   A was told %.1f ms before B got in.", ms(margin))
			return nil
		}
		// Goroutines of this process took the times. If the machine lets it stand still, they are late.
		late := s.told.Sub(s.deadline)
		if attempt == maxAttempts {
			return fmt.Errorf("A was told %.1f ms after its deadline and %.1f ms after B got in", ms(late), ms(-margin))
		}
		d.say("   This machine is too busy to tell: A ran %.1f ms after it should have. Once more.", ms(late))
	}
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// scene is one attempt of cutOff.
type scene struct {
	*demo
	begin time.Time
	key   string // of the value that A and B write

	told     time.Time // when A's context had ended
	deadline time.Time // how long A might rely on the lock
	entered  time.Time // when B had got in
}

// say is demo.say, with the time.
func (s *scene) say(format string, args ...any) {
	s.demo.say("   %.3f s  "+format, append([]any{time.Since(s.begin).Seconds()}, args...)...)
}

func (s *scene) play(ctx context.Context) error {
	line, err := newCable(s.server.options.Network, s.server.options.Addr)
	if err != nil {
		return err
	}
	defer line.Close()
	rdbOfA := s.server.client(func(o *redis.Options) { o.Network, o.Addr = "tcp", line.Addr() })
	defer rdbOfA.Close()

	options := []lock.Option{
		lock.WithPrefix(s.prefix),
		lock.WithTTL(leaseTTL),
		lock.WithFencing(),                             // every grant has a number that is higher than those before
		lock.WithLogger(slog.New(slog.DiscardHandler)), // it would warn of the loss; here A itself tells of it
	}
	a, b := lock.New(rdbOfA, options...), lock.New(s.rdb, options...)
	defer finish(ctx, a)
	defer finish(ctx, b)

	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	held, err := a.Acquire(ctx, ledgerLock)
	if err != nil {
		return err
	}
	defer held.Release(ctx)
	defer line.Mend()
	s.say("A has the lock, with fence %d. B waits for it.", held.Fence())
	written := make(chan error, 1)
	wg.Go(func() { written <- s.writeAsB(ctx, b) })

	if err := s.loseA(ctx, held, line); err != nil {
		return err
	}
	if err := <-written; err != nil {
		return fmt.Errorf("B: %w", err)
	}
	line.Mend()
	if err := s.writeLate(ctx, held.Fence(), rdbOfA); err != nil {
		return err
	}
	if err := held.Release(ctx); !errors.Is(err, lock.ErrLost) {
		return fmt.Errorf("A released a lock that it had lost, and got: %v", err)
	}
	return nil
}

// loseA cuts the line of A, the holder, and returns when A has been told that the lock is lost.
func (s *scene) loseA(ctx context.Context, held *lock.Lock, line *cable) error {
	select {
	case <-time.After(beforeCut):
	case <-ctx.Done():
		return ctx.Err()
	}
	line.Cut()
	s.say("A's line to Redis goes dead: no answers, no errors.")

	select {
	case <-held.Context().Done(): // what A does under the lock takes this context, and so ends now
		s.told = time.Now()
	case <-ctx.Done():
		return ctx.Err()
	}
	s.deadline = held.Deadline()
	cause := context.Cause(held.Context())
	s.say("A is told. The cause of its context is: %v", cause)
	if !errors.Is(cause, lock.ErrLost) || held.Valid() {
		return fmt.Errorf("A should have lost the lock; its context ended with: %w", cause)
	}
	return nil
}

// writeAsB waits for the lock and writes.
func (s *scene) writeAsB(ctx context.Context, locker *lock.Locker) error {
	return locker.Do(ctx, ledgerLock, func(ctx context.Context) error {
		s.entered = time.Now()
		held, _ := lock.FromContext(ctx)
		s.say("B has the lock, with fence %d.", held.Fence())
		if err := held.Fence().Set(ctx, s.rdb, s.key, "from B"); err != nil {
			return err
		}
		s.say("B writes with its fence: accepted.")
		return nil
	})
}

// writeLate is what A does although it was told to stop.
func (s *scene) writeLate(ctx context.Context, fence lock.Fence, rdb *redis.Client) error {
	err := fence.Set(ctx, rdb, s.key, "from A")
	if !errors.Is(err, lock.ErrStale) {
		return fmt.Errorf("the late write of A should have been refused; its error is: %v", err)
	}
	s.say("A's line is back, and A writes, too late: refused, %v", err)
	value, err := s.rdb.Get(ctx, s.key).Result()
	if err == nil && value != "from B" {
		err = fmt.Errorf("what B wrote has become %q", value)
	}
	return err
}
