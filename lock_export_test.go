package lock

import (
	"time"

	"github.com/seed-b640e7e9/lock/internal/keys"
)

// Waiting returns how many of the process stand in line for a name, behind the one who has the turn.
func Waiting(l *Locker, name string) int {
	return l.core.room.Waiting(keys.Lock(l.opts.prefix, name))
}

// Suspend makes it seem that the machine has been suspended since the lock was last confirmed.
func Suspend(lk *Lock, d time.Duration) {
	l := lk.grant.lease
	l.mu.Lock()
	defer l.mu.Unlock()
	l.suspended -= d
}

// SameLease tells whether one lock was passed on to become the other.
func SameLease(a, b *Lock) bool { return a.grant.lease == b.grant.lease }
