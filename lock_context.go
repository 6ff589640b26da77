package lock

import "context"

// lockContext is the context of a Lock. It embeds a standard cancel context, as contexts derived from any other cost a
// goroutine each, and knows its Lock.
type lockContext struct {
	context.Context
	values context.Context // whose values it has; nil if those of the embedded one suffice
	lock   *Lock
}

type lockKey struct{}

// Value returns the Lock for the package's own key, else what the acquiring context has.
func (c *lockContext) Value(key any) any {
	if key == (lockKey{}) {
		return c.lock
	}
	if v := c.Context.Value(key); v != nil || c.values == nil {
		return v
	}
	return c.values.Value(key)
}

// FromContext returns the innermost lock that ctx belongs to: inside the fn of Do, the one that fn holds.
func FromContext(ctx context.Context) (*Lock, bool) {
	lk, ok := ctx.Value(lockKey{}).(*Lock)
	return lk, ok
}

// outer returns the lock under which lk was acquired.
func (lk *Lock) outer() (*Lock, bool) {
	if lk.ctx.values != nil {
		return FromContext(lk.ctx.values)
	}
	return FromContext(lk.ctx.Context)
}
