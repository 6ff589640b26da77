package redlock

import "github.com/seed-b640e7e9/lock"

// Over is New for Stores of any kind.
func Over(stores []lock.Store, opts ...lock.Option) *lock.Locker {
	return lock.NewWithStore(newQuorum(stores), opts...)
}

// Quorum is the Store of Over.
func Quorum(stores []lock.Store) lock.Store { return newQuorum(stores) }

// Tokens returns how many tokens are remembered.
func Tokens(s lock.Store) int {
	q := s.(*quorum)
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.tokens)
}

// The bounds on commands under way.
const (
	InFlight = inFlight
	ManyMore = manyMore
)
