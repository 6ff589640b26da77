// Package locktest is the conformance suite: what a Locker promises, whatever its Store and server are. In the manner
// of testing/slogtest, a back end says how it is made, and the suite does the rest.
//
// The suite runs in real time, where it waits for events and has generous bounds, and in a synctest bubble.
package locktest

import (
	"context"
	"crypto/rand"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
)

// Backend is one way of keeping leases. Names that it is called with are whole, with their prefix.
type Backend struct {
	// New makes a Locker on its own client, as another process would.
	New func(t *testing.T, opts ...lock.Option) *lock.Locker
	// Delete removes the lock of a name behind its holder's back.
	Delete func(t *testing.T, name string)
	// Overwrite gives the lock of a name to nobody known, for a minute.
	Overwrite func(t *testing.T, name string)
	// SetFence sets the counter of a name. Nil if the back end can't.
	SetFence func(t *testing.T, name string, n lock.Fence)
}

// Run runs the suite, its tests in parallel: they wait more than they work. open makes the back end, once for each test.
func Run(t *testing.T, open func(t *testing.T) Backend) {
	t.Helper()
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			test.run(t, &bench{Backend: open(t)})
		})
	}
}

// RunInBubbles is Run with a synctest bubble around each test.
func RunInBubbles(t *testing.T, open func(t *testing.T) Backend) {
	t.Helper()
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { test.run(t, &bench{Backend: open(t)}) })
		})
	}
}

type test struct {
	name string
	run  func(t *testing.T, b *bench)
}

var tests = slices.Concat(lifeTests, lineTests, lossTests, fenceTests)

// bench is what a test works with.
type bench struct{ Backend }

const (
	ttl    = 600 * time.Millisecond // short, for tests that wait for several of them
	patrol = 30 * time.Second       // bounds what should come soon
)

// locker makes a Locker and, at the test's end, sees that nothing of it is left.
func (b *bench) locker(t *testing.T, opts ...lock.Option) *lock.Locker {
	t.Helper()
	l := b.New(t, append([]lock.Option{lock.WithTTL(ttl)}, opts...)...)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patrol)
		defer cancel()
		require.NoError(t, l.Wait(ctx), "a lease or a clean-up is left")
	})
	return l
}

// name returns one that no other test has.
func (b *bench) name() string { return rand.Text() }

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patrol)
	t.Cleanup(cancel)
	return ctx
}

func acquire(t *testing.T, l *lock.Locker, name string) *lock.Lock {
	t.Helper()
	lk, err := l.Acquire(within(t), name)
	require.NoError(t, err)
	return lk
}

func release(t *testing.T, lk *lock.Lock) {
	t.Helper()
	require.NoError(t, lk.Release(within(t)))
}

func requireHeld(t *testing.T, l *lock.Locker, name string) {
	t.Helper()
	lk, err := l.TryAcquire(within(t), name)
	require.ErrorIs(t, err, lock.ErrHeld)
	require.NotErrorIs(t, err, lock.ErrUnknown)
	require.Nil(t, lk)
}

// requireFree takes the lock, which has to be free by now or soon.
func requireFree(t *testing.T, l *lock.Locker, name string) {
	t.Helper()
	release(t, acquire(t, l, name))
}

// requireEnd waits for the end of a context and returns its cause.
func requireEnd(t *testing.T, ctx context.Context) error {
	t.Helper()
	select {
	case <-ctx.Done():
	case <-time.After(patrol):
		t.Fatal("the context does not end")
	}
	return context.Cause(ctx)
}
