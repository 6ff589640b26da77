package lock

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/seed-b640e7e9/lock/internal/call"
	"github.com/seed-b640e7e9/lock/internal/sweep"
	"github.com/seed-b640e7e9/lock/internal/wait"
)

// Release gives the lock up. The lock's context ends first, with the cause ErrReleased; then the key is deleted.
//
// It tries even if ctx has ended, for about a second; a defer lk.Release(ctx) is right. If ctx ends meanwhile it
// returns soon, and the delete goes on in the background for as long as the lease may last. On a Redis that does not
// answer it takes two seconds or, with a context that can't end and a client without ContextTimeoutEnabled, as long as
// the client's own timeouts let it.
//
// If others of the process wait the lock may be passed on to the first of them, without anything being sent.
//
// It returns nil if the lock was released, also by an earlier call, and an *Error that matches ErrLost if the lock was
// lost before. These outcomes are final. Otherwise Redis could not be reached, or, if it matches ErrUnknown, did not
// answer; a further call tries again. Concurrent calls wait for the one under way.
func (lk *Lock) Release(ctx context.Context) (err error) {
	if ctx.Err() != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), releaseBudget)
		defer cancel()
	}
	if settled, err := lk.enter(ctx); settled || err != nil {
		return err
	}
	var final bool
	defer func() { lk.leave(err, final) }()
	if err, final = lk.release(ctx); err != nil {
		err = &Error{Op: "release", Name: lk.name, Err: err}
	}
	return err
}

// enter waits for a Release under way. It returns the outcome if that is settled; otherwise it is the caller's turn.
func (lk *Lock) enter(ctx context.Context) (settled bool, err error) {
	lk.mu.Lock()
	defer lk.mu.Unlock()
	for lk.releasing {
		if lk.after == nil {
			lk.after = make(chan struct{})
		}
		after := lk.after
		lk.mu.Unlock()
		select {
		case <-after:
		case <-ctx.Done():
		}
		lk.mu.Lock()
		if lk.releasing && ctx.Err() != nil {
			return false, &Error{Op: "release", Name: lk.name, Err: fmt.Errorf("%w: %w", ErrUnknown, call.ContextError(ctx))}
		}
	}
	if lk.settled {
		return true, lk.outcome
	}
	lk.releasing = true
	return false, nil
}

func (lk *Lock) leave(err error, final bool) {
	lk.mu.Lock()
	defer lk.mu.Unlock()
	lk.releasing = false
	if final {
		lk.settled, lk.outcome = true, err
		tethers.Put(lk.tether)
		lk.tether = nil
	}
	if lk.after != nil {
		close(lk.after)
		lk.after = nil
	}
}

// release passes the lease on, or ends it and deletes the key. It tells whether the outcome is definite.
func (lk *Lock) release(ctx context.Context) (err error, final bool) {
	g, l := lk.grant, lk.grant.lease
	if lk.keep.IsZero() && lk.core.passOn(g) {
		return nil, true
	}
	lk.core.dog.count(1)
	defer lk.core.dog.count(-1)
	began := time.Now()
	reply := Reply{Listeners: -1}
	first := false
	switch err := g.finish(); {
	case err == nil:
		first = true
		defer func() { lk.core.vacate(l, reply, time.Since(began)) }()
	case err == errGone:
		lk.core.sweepStrays(l.request(), l.strays)
		return err, true
	case err != ErrReleased:
		lk.sweep() // it may be there yet: renewals may have arrived whose answers did not
		return err, true
	}
	err = persist(ctx, func() (err error) {
		if reply, err = lk.core.store.Release(ctx, lk.core.ending(l, lk.keep)); err != nil {
			reply.Listeners = -1
		}
		if errors.Is(err, ErrUnknown) {
			lk.unsure = err
		}
		return err
	})
	overslept := err != nil && first && g.overslept(began)
	if errors.Is(err, ErrLost) && !overslept && (lk.unsure != nil || !time.Now().Before(g.end())) {
		err = nil // gone: an earlier delete has worked, or the lease ran out on the way, after it was given up
	}
	switch {
	case err == nil, errors.Is(err, ErrLost):
		lk.core.sweepStrays(l.request(), l.strays)
		if err != nil {
			return errGone, true
		}
		lk.core.warnMute(reply, g.logger)
		return nil, true
	case overslept:
		lk.sweep()
		return fmt.Errorf("%w: the machine was suspended: %w", ErrLost, err), true
	default:
		if lk.unsure == nil {
			lk.unsure = err
		}
		lk.sweep()
		return err, false
	}
}

// warnMute says once if waiters are not told of releases.
func (c *core) warnMute(r Reply, logger *slog.Logger) {
	if r.Mute != nil && !c.mute.Swap(true) {
		orDefault(logger).Warn("lock: waiters are not told of releases, and find out by asking", "error", r.Mute)
	}
}

// ending is the request that gives the key up now, or leaves it until keep, and wakes other rooms: in this one the turn
// is passed on when it is done.
func (c *core) ending(l *lease, keep time.Time) Request {
	r := Request{Key: l.key, Token: l.token, TTL: l.longest()}
	if !l.apart {
		r.From = c.id
	}
	if !keep.IsZero() {
		r.Hold = max(0, time.Until(keep))
	}
	return r
}

// sweep goes on releasing in the background, for as long as the key may last.
func (lk *Lock) sweep() {
	if !lk.swept {
		lk.swept = true
		lk.core.end(lk.grant.lease, lk.keep)
	}
}

// end releases in the background, for as long as the key may last, and wakes everybody.
func (c *core) end(l *lease, keep time.Time) {
	c.sweeper.Add(sweep.Task{Until: l.lasts(), Do: func(ctx context.Context) bool {
		r := c.ending(l, keep)
		r.From = ""
		_, err := c.store.Release(ctx, r)
		if err == nil || errors.Is(err, ErrLost) {
			c.sweepStrays(l.request(), l.strays)
			return true
		}
		return IsPermanent(err)
	}})
}

// persist repeats step while it fails for a reason that may pass, until ctx or the budget ends, but at least once: the
// first may have spent the budget on a connection that is dead.
func persist(ctx context.Context, step func() error) error {
	var pause wait.Pause
	var unknown error
	end := time.Now().Add(releaseBudget)
	for again := false; ; again = true {
		err := step()
		if err == nil || errors.Is(err, ErrLost) || errors.Is(err, ErrReleased) {
			return err
		}
		if errors.Is(err, ErrUnknown) {
			unknown = err
		} else if unknown != nil {
			err = fmt.Errorf("%w; before: %w", err, unknown)
		}
		if IsPermanent(err) || again && !time.Now().Before(end) || !wait.Sleep(ctx, pause.Next(0)) {
			return withContext(ctx, err)
		}
	}
}
