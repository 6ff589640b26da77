package lock

import (
	"context"
	"errors"
	"sync/atomic"
)

// noDefault is the Store behind Default before SetDefault: it fails closed.
type noDefault struct{}

func (noDefault) Acquire(context.Context, Request) (Reply, error) {
	return Reply{}, Permanent(ErrNoDefault)
}

func (noDefault) Renew(_ context.Context, rs []Request, done func(int, Reply, error)) {
	for i := range rs {
		done(i, Reply{}, Permanent(ErrNoDefault))
	}
}

func (noDefault) Release(context.Context, Request) (Reply, error) {
	return Reply{}, Permanent(ErrNoDefault)
}

func (noDefault) Listen(context.Context, Key, func(string)) (func(), error) {
	return nil, errors.ErrUnsupported
}

func (noDefault) Wait(context.Context) error { return nil }

var defaultLocker atomic.Pointer[Locker]

func init() { defaultLocker.Store(NewWithStore(noDefault{})) }

// SetDefault makes l the Locker of the package-level functions. It panics if l is nil.
func SetDefault(l *Locker) {
	if l == nil {
		panic("lock: SetDefault of a nil Locker")
	}
	defaultLocker.Store(l)
}

// Default returns the Locker of the package-level functions. Before SetDefault it is one whose calls fail with
// ErrNoDefault.
func Default() *Locker { return defaultLocker.Load() }

// Do calls Do of the default Locker.
func Do(ctx context.Context, name string, fn func(ctx context.Context) error) error {
	return Default().Do(ctx, name, fn)
}

// TryDo calls TryDo of the default Locker.
func TryDo(ctx context.Context, name string, fn func(ctx context.Context) error) error {
	return Default().TryDo(ctx, name, fn)
}
