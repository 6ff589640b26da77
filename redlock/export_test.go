package redlock

import "github.com/seed-b640e7e9/lock"

// Over is New for Stores of any kind.
func Over(stores []lock.Store, opts ...lock.Option) *lock.Locker {
	return lock.NewWithStore(newQuorum(stores), opts...)
}

const InFlight = inFlight
