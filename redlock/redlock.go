// Package redlock takes locks on a quorum of independent Redis nodes: a lock outlives the loss of a minority of them.
//
//	locker := redlock.New([]redis.UniversalClient{a, b, c})
//
// The Locker is that of package lock: all that is said there holds, with a quorum of the nodes in the place of the one
// Redis. A lock is held while more than half of the nodes hold its token. The algorithm is the one that the Redis
// documentation describes as Redlock ("Distributed Locks with Redis", redis.io).
//
// # What it adds, and what it does not
//
// It adds that nodes may fail: with three nodes one, with five two may be down, slow or silent, and locks are taken,
// renewed and released as if nothing had happened, in the time that the others need. It needs no replication, and no
// failover to trust.
//
// It does not help against what a single Redis does not help against either: a process that is paused between its last
// check and its effect, and a clock of a node that jumps. And it adds an assumption of its own: a node that has taken
// part in a grant must not forget it. If a node loses its data and comes back within a TTL, another may win the
// forgotten vote. So let nodes persist (appendonly yes, appendfsync always), or start them again only after the longest
// TTL in use. Nodes must be independent: not replicas of each other, not one cluster.
//
// Where the protected resource can check a fence, a single Redis with fencing is simpler and protects better. Redlock is
// for availability: when waiting for one Redis to come back costs more than running three or five. Both sides of the
// debate are worth reading before: Martin Kleppmann, "How to do distributed locking" (2016), and Salvatore Sanfilippo, "Is
// Redlock safe?" (2016).
//
// # Votes
//
// All nodes are asked at the same time, and the answer is there as soon as a quorum has decided. A node has a twentieth
// of the TTL for a command, at least 250 ms and at most a second, but never more than half of the TTL. When several vote
// at the same time and none gets a quorum, all give back what they have and vote again after a random while: of those that
// try at the same time one gets the lock, also if each makes one attempt only. If two tried at once this took 1.5 votes
// each at the mean of 50 simulated runs, with five that try 2.9, with twenty 6.4 (five nodes; the test
// OfSeveralThatTryAtTheSameTimeOneGetsTheLock logs it). Each vote costs one command a node.
//
// A renewal counts the nodes that have the token now. While they are a quorum, nodes that have lost it get it again; when
// a quorum has lost it, so has the holder.
//
// # Errors
//
// An acquire that failed matches [lock.ErrHeld] if one other holds a quorum, [ErrNoQuorum] if too few nodes answered, [ErrSplit] if
// votes stayed split, and [lock.ErrUnknown] if the context ended first or the grant came too late to be of use. [NodeErrors] tells what
// each node said. Whatever a failed acquire may have taken is given back in the background, also by commands that arrive
// late; Wait waits for that.
//
// # Fences
//
// Each node counts for itself. If a quorum does not answer with the same number, the highest is written back to a quorum,
// under the token, before the lock is granted; that is a second round. Numbers rise strictly as long as no node of the
// last such quorum loses its counter; with [lock.WithClockFencing], which always takes two rounds, also after a wipe, as
// far as the clocks of the nodes agree. They are not dense.
package redlock

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/seed-b640e7e9/lock"
)

// New returns a Locker on a quorum of independent nodes: three, five, or another odd number up to 15. It does no I/O.
// Clients should have ContextTimeoutEnabled, as with [lock.New]. All processes must name the same nodes; their order does
// not matter.
//
// New panics if the number is even or one, if a node is nil or named twice, and where lock.New does.
func New(nodes []redis.UniversalClient, opts ...lock.Option) *lock.Locker {
	if err := check(nodes); err != nil {
		panic("redlock: " + err.Error())
	}
	stores := make([]lock.Store, len(nodes))
	for i, n := range nodes {
		stores[i] = lock.NewStore(n)
	}
	return lock.NewWithStore(newQuorum(stores), opts...)
}

// maxNodes is more than anyone needs: each node more makes every lock dearer.
const maxNodes = 15

func check(nodes []redis.UniversalClient) error {
	if len(nodes) < 3 || len(nodes)%2 == 0 || len(nodes) > maxNodes {
		return fmt.Errorf("%d nodes; it takes an odd number, from 3 to %d", len(nodes), maxNodes)
	}
	seen := map[any]int{}
	for i, n := range nodes {
		if v := reflect.ValueOf(n); n == nil || v.Kind() == reflect.Pointer && v.IsNil() {
			return fmt.Errorf("node %d is nil", i)
		}
		same := []any{n}
		if c, ok := n.(*redis.Client); ok && c.Options().Addr != behindSentinel {
			same = append(same, c.Options().Addr)
		}
		for _, key := range same {
			if j, ok := seen[key]; ok {
				return fmt.Errorf("nodes %d and %d are the same", j, i)
			}
			seen[key] = i
		}
	}
	return nil
}

// behindSentinel is what go-redis calls the address of a client that asks Sentinel for it.
const behindSentinel = "FailoverClient"

var (
	// ErrNoQuorum is the error of an operation that too few nodes took part in: the others could not be reached, or refused.
	ErrNoQuorum = errors.New("redlock: no quorum of nodes")

	// ErrSplit is the error of an acquire that ended, although a quorum of nodes answered, without anyone having the lock:
	// several tried at the same time again and again, or those who did have crashed.
	ErrSplit = errors.New("redlock: the vote was split")
)

// NodeError is what one node said. See NodeErrors.
type NodeError struct {
	Node int // its place in the list given to New
	Err  error
}

// Error returns the text.
func (e *NodeError) Error() string { return fmt.Sprintf("node %d: %v", e.Node, e.Err) }

// Unwrap returns Err.
func (e *NodeError) Unwrap() error { return e.Err }

// NodeErrors returns what the nodes said that an operation failed at, in the order of the nodes; nil if err is of another
// kind. errors.As finds the first of them, and errors.Is and errors.As look at the errors that they carry, but for ErrHeld,
// ErrLost and ErrUnknown: those are said of the lock, not of a node.
func NodeErrors(err error) []*NodeError {
	var all nodeErrors
	errors.As(err, &all)
	return all
}

// nodeErrors are those of several nodes.
type nodeErrors []*NodeError

// Error returns their texts.
func (es nodeErrors) Error() string {
	texts := make([]string, len(es))
	for i, e := range es {
		texts[i] = e.Error()
	}
	return strings.Join(texts, "; ")
}

// Is tells whether a node's error matches, unless target says something of the lock.
func (es nodeErrors) Is(target error) bool {
	if target == lock.ErrHeld || target == lock.ErrLost || target == lock.ErrUnknown {
		return false
	}
	return slices.ContainsFunc(es, func(e *NodeError) bool { return errors.Is(e, target) })
}

// As finds the first of them, or the first error in them, that fits.
func (es nodeErrors) As(target any) bool {
	return slices.ContainsFunc(es, func(e *NodeError) bool { return errors.As(e, target) })
}
