package lock

import (
	"context"
	"errors"
	"time"

	"github.com/seed-b640e7e9/lock/internal/call"
	"github.com/seed-b640e7e9/lock/internal/wait"
)

// contention is what one has who contends for a lock that was not free at once. It is passed on with the turn.
type contention struct {
	attempt
	pause wait.Pause
	next  time.Time     // when to try again
	heard chan struct{} // gets a value when there is reason to try before
	stop  func()        // ends listening; nil while nobody listens
	deaf  time.Time     // until then no further attempt is made to listen
	apart bool          // the turn is somebody else's
}

func newContention(a attempt) *contention {
	return &contention{attempt: a, heard: make(chan struct{}, 1)}
}

// wake is called when the lock may have become free. It does not block: one reason is enough.
func (c *contention) wake() {
	select {
	case c.heard <- struct{}{}:
	default:
	}
}

// silence ends listening.
func (c *contention) silence() {
	if c.stop != nil {
		c.stop()
		c.stop = nil
	}
}

// close ends what nobody goes on with.
func (c *contention) close(core *core) {
	c.silence()
	core.sweepStrays(c.req, c.strays)
}

// adopt makes the caller go on where another has given up: with the same token, if that is what the caller would have
// asked for.
func (l *Locker) adopt(c *contention, a *attempt) {
	if c.req.TTL != a.req.TTL || c.req.Fence != a.req.Fence {
		l.core.sweepStrays(c.req, c.strays)
		a.last = c.last
		c.attempt = *a
	}
}

// contend goes on, after a try that ended with err or, if that is nil, where another has given up, until the lock is
// granted, ctx ends or trying is of no use. It returns the last error, which may be the other's.
func (l *Locker) contend(ctx context.Context, c *contention, try bool, remaining time.Duration, err error) (granted, error) {
	if err == nil && time.Until(c.next) > 0 { // there is time for it
		soon, cancel := context.WithDeadline(ctx, c.next)
		l.listen(soon, c)
		cancel()
	}
	for n := 0; ; n++ {
		if err != nil {
			if c.last != nil && errors.Is(err, ctx.Err()) && !errors.Is(err, ErrUnknown) {
				return granted{}, c.last // nothing was sent after that
			}
			c.last, c.block, c.stood = err, 0, 0 // others may have come
			if IsPermanent(err) || ctx.Err() != nil || try && (n > 0 || !errors.Is(err, ErrUnknown)) {
				return granted{}, err
			}
			if !c.apart {
				l.core.room.Show(c.req.Key.Lock, turn{last: err})
			}
			c.next = time.Now().Add(l.pause(ctx, c, try, remaining))
		}
		if !c.sleep(ctx) {
			return granted{}, c.said(ctx)
		}
		c.before = c.last
		var g granted
		if g, remaining, err = l.once(ctx, &c.attempt); err == nil {
			return g, nil
		}
	}
}

// pause returns how long to sleep after a try. Who finds the lock held begins to listen, and tries again at once: the
// release may have come in between.
func (l *Locker) pause(ctx context.Context, c *contention, try bool, remaining time.Duration) time.Duration {
	switch {
	case try || !errors.Is(c.last, ErrHeld):
		return c.pause.Next(0)
	case c.stop != nil:
		return c.pause.Told(remaining)
	case l.listen(ctx, c):
		return 0
	default:
		return c.pause.Next(remaining)
	}
}

// pauseListening is how long a waiter asks instead, after listening has failed.
const pauseListening = 5 * time.Second

// said is the error of one who gives up without another try.
func (c *contention) said(ctx context.Context) error {
	if c.last == nil {
		return call.ContextError(ctx)
	}
	return c.last
}

// listen begins to listen, and tells whether it does.
func (l *Locker) listen(ctx context.Context, c *contention) bool {
	switch {
	case c.stop != nil:
		return true
	case time.Now().Before(c.deaf):
		return false
	}
	stop, err := l.core.store.Listen(ctx, c.req.Key, func(from string) {
		if from != l.core.id {
			c.wake()
		}
	})
	if err == nil {
		c.stop = stop
		return true
	}
	if ctx.Err() == nil {
		c.deaf = time.Now().Add(pauseListening)
	}
	if errors.Is(err, errors.ErrUnsupported) && !l.core.deaf.Swap(true) {
		orDefault(l.opts.logger).Warn("lock: waiters are not woken, but ask again a few times a second", "error", err)
	}
	return false
}

// sleep returns when it is time for the next try, or with false when ctx has ended; then that time is left to the next.
func (c *contention) sleep(ctx context.Context) bool {
	d := time.Until(c.next)
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-c.heard:
		c.next, c.stood = time.Time{}, 0
	case <-t.C:
	case <-ctx.Done():
	}
	return ctx.Err() == nil
}
