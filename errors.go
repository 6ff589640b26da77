package lock

import (
	"errors"
	"strconv"
)

// What can go wrong, for errors.Is. They come wrapped in an *Error. An error that matches none of them, nor the
// context's, is the client's own: Redis could not be reached, or refused; the lock was certainly not taken.
var (
	// ErrHeld: another holds the lock.
	ErrHeld = errors.New("lock held by another")

	// ErrLost: the lease ended while the lock was still in use, so the critical section may not have been exclusive to
	// its end. With ErrUnknown beside it the lease ran out because no renewal was confirmed in time; without, the server
	// said that the key is gone or another's, or WithMaxHold has ended it.
	ErrLost = errors.New("lock lost")

	// ErrReleased: the lock was released before. It is also the cause of a released lock's context.
	ErrReleased = errors.New("lock released")

	// ErrUnknown: a command was sent and no answer came, so it may have had its effect, or have it later. What an acquire
	// of unknown outcome may leave behind is cleaned up in the background.
	ErrUnknown = errors.New("outcome unknown")

	// ErrReentrant: the context belongs to a holder of the same lock, which would wait for itself.
	ErrReentrant = errors.New("lock already held by the caller")

	// ErrStale: a write was refused because a newer holder has written before.
	ErrStale = errors.New("stale fence")

	// ErrNoFence: the lock was taken without fencing.
	ErrNoFence = errors.New("no fence")

	// ErrNoDefault: the package-level functions need SetDefault first.
	ErrNoDefault = errors.New("no default Locker; call SetDefault first")
)

// Error is the error of an operation on a lock, in the shape of fs.PathError.
type Error struct {
	Op   string // "acquire", "hold", "extend", "release", "do" or "write"
	Name string // what was to be locked
	Err  error  // why
}

// Error returns the text, with the name quoted and, if it is very long, cut.
func (e *Error) Error() string {
	name := e.Name
	if len(name) > 100 {
		name = name[:100] + "..."
	}
	return "lock: " + e.Op + " " + strconv.Quote(name) + ": " + e.Err.Error()
}

// Unwrap returns Err.
func (e *Error) Unwrap() error { return e.Err }
