package lock

import (
	"context"
	"errors"
	"time"
)

// Store keeps leases: it is to a Locker what a slog.Handler is to a Logger. Users call a Locker; a Store is written by
// those who bring another way of keeping leases, such as a quorum of servers. It is experimental until v1: structs may
// gain fields.
//
// Each call makes one attempt and ends when ctx does. Errors are told apart by errors.Is: ErrHeld, ErrLost, ErrUnknown
// (the attempt may have had its effect, or have it later); any other error means that it certainly had none. Permanent
// marks those that waiting can't heal. A Store must be safe for concurrent use.
type Store interface {
	// Acquire takes the key for the token, unless another token has it (ErrHeld). If the key has the token already, its
	// TTL is raised to the request's and the fence is the same as before.
	Acquire(ctx context.Context, r Request) (Reply, error)

	// Renew raises the TTLs of leases, never lowering one, and reserves fences where a request has a Count. It calls done
	// exactly once for each request, maybe from several goroutines and as soon as that request is decided, and returns
	// after the last. ErrLost says that the key is gone or another's.
	Renew(ctx context.Context, rs []Request, done func(i int, r Reply, err error))

	// Release deletes the key if it has the token, or leaves it, of no more use to the token, for the request's Hold, and
	// tells those who listen to the key. ErrLost says that the key is gone or another's.
	Release(ctx context.Context, r Request) (Reply, error)

	// Listen returns when it is certain that wake will be called for each Release of the key from now on, with its From, and
	// with "" whenever one may have been missed. wake does not block. The error matches errors.ErrUnsupported if there is no use in asking
	// again. stop ends listening; it does not block.
	Listen(ctx context.Context, key Key, wake func(from string)) (stop func(), err error)

	// Wait returns nil when nothing of the Store runs in the background and nobody listens, or ctx's error. It ends what
	// is only kept for the next use.
	Wait(ctx context.Context) error
}

// Key is where a name lives in Redis.
type Key struct {
	Lock  string // holds the token
	Fence string // holds the fence counter; empty without fencing
}

// FenceMode says how fences are counted.
type FenceMode uint8

const (
	FenceOff     FenceMode = iota // no fences
	FenceCounter                  // one more than the last
	FenceClock                    // the same, but at least the server's time in microseconds
)

// Request is what a Store is asked for. Each method uses the fields that it needs.
type Request struct {
	Key   Key
	Token string
	TTL   time.Duration // of Acquire and Renew, in whole milliseconds; of Release, how long the key may last at most
	Fence FenceMode     // of Acquire, and of Renew with a Count
	Again bool          // of Acquire: the token was sent before, or the key is known to be held: ask for more than a yes
	Used  bool          // of Acquire: the token was sent before
	Count int           // of Acquire: fences to reserve beside the grant's own; of Renew: grants that are to follow
	Floor Fence         // of Renew: the highest fence known: the counter rises to it, and what is reserved lies above
	Hold  time.Duration // of Release: how much longer the key stays, although nobody holds it
	From  string        // of Release: what those who listen hear, so that they know whether they knew
	Quiet bool          // of Release: nobody is told
	Limit time.Duration // of Acquire and Release: how long the command may take; zero: a second
	Live  func() bool   // of Renew: whether the lease is held still; nil: it is
}

// Reply is what a Store answers.
type Reply struct {
	Fence     Fence         // of Acquire, the last number that was reserved or, without a Count, the grant's own; of Renew the same
	Own       bool          // of Acquire: the key had the token already, from an earlier send, and nothing was reserved
	Spent     bool          // of a failed Acquire: the token was given up, with clean-up and all; the next try needs another
	Remaining time.Duration // of ErrHeld: when the key ends unless it is renewed; not positive if unknown
	Holder    string        // of ErrHeld: the same for the same token; empty if unknown
	Token     string        // of Acquire: what the key has now, if it is not the request's
	Listeners int           // of Release, and of Renew with a Count: who listens to the key; negative if unknown
	Mute      error         // of Release: why those who listen were not told, if they were not
}

// Permanent marks err as one that waiting does not heal: a waiting Acquire gives up at once. A nil err stays nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return permanent{err}
}

// IsPermanent tells whether err was marked by Permanent.
func IsPermanent(err error) bool {
	var p permanent
	return errors.As(err, &p)
}

type permanent struct{ error }

func (p permanent) Unwrap() error { return p.error }
