package lock

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/seed-b640e7e9/lock/internal/keys"
)

// options are the settings of a Locker.
type options struct {
	ttl     time.Duration
	prefix  string
	fence   FenceMode
	logger  *slog.Logger // nil: slog.Default()
	maxWait time.Duration
	maxHold time.Duration
	minHold time.Duration

	handoffs int
}

func (o *options) check() error {
	for _, d := range []struct {
		option string
		value  time.Duration
	}{{"WithMaxWait", o.maxWait}, {"WithMaxHold", o.maxHold}, {"WithMinHold", o.minHold}} {
		if d.value < 0 || d.value > maxTTL {
			return fmt.Errorf("%s: %v is not between 0 and %v", d.option, d.value, maxTTL)
		}
	}
	if o.handoffs < 0 || o.handoffs > maxHandoffs {
		return fmt.Errorf("WithMaxHandoffs: %d is not between 0 and %d", o.handoffs, maxHandoffs)
	}
	if err := keys.CheckPrefix(o.prefix); err != nil {
		return fmt.Errorf("WithPrefix: %w", err)
	}
	if err := checkTTL(o.ttl); err != nil {
		return fmt.Errorf("WithTTL: %w", err)
	}
	return nil
}

func checkTTL(ttl time.Duration) error {
	if ttl < minTTL || ttl > maxTTL {
		return fmt.Errorf("a TTL of %v is not between %v and %v", ttl, minTTL, maxTTL)
	}
	return nil
}

// An Option is a setting of New and With.
type Option func(*options)

// WithTTL sets how long a lease lasts unless it is renewed: 10 s by default, at least 10 ms, in whole milliseconds.
// Others wait that long for the lock of a process that has crashed. It is renewed three times in that time; a holder
// that can't reach Redis is told of the loss shortly before that time is over.
func WithTTL(d time.Duration) Option {
	return func(o *options) { o.ttl = d.Truncate(time.Millisecond) }
}

// WithPrefix sets what all keys begin with, for example a tenant. Lockers with different prefixes do not exclude each
// other, provided that neither prefix begins with the other. A prefix with a hash tag keeps all its names in one cluster slot; one
// with a brace but no complete tag is invalid.
func WithPrefix(prefix string) Option {
	return func(o *options) { o.prefix = prefix }
}

// WithFencing gives every grant a Fence, from a counter that Redis keeps for each name: one small key, which must not
// be deleted and does not expire. Numbers are as durable as Redis's data; a server that loses it starts again from 1.
func WithFencing() Option {
	return func(o *options) { o.fence = FenceCounter }
}

// WithClockFencing is WithFencing, with numbers that go on rising when Redis has lost its data: each is at least the
// server's clock in microseconds. That holds as far as the clock of the server that takes over is not behind that of
// the one before.
func WithClockFencing() Option {
	return func(o *options) { o.fence = FenceClock }
}

// WithLogger sets where losses, failed releases and forgotten locks are reported. The default, also for nil, is
// slog.Default().
func WithLogger(logger *slog.Logger) Option {
	return func(o *options) { o.logger = logger }
}

// WithMaxWait bounds how long Acquire and Do wait for the lock, where ctx bounds the work too. Zero, the default, does
// not.
func WithMaxWait(d time.Duration) Option {
	return func(o *options) { o.maxWait = d }
}

// WithMaxHold ends renewal so that no renewal carries the lease beyond d after the grant: then the lock is lost, and a
// section that hangs does not block others for ever. The first lease lasts for the TTL, also if d is shorter. Zero, the
// default, sets no end. Extend is not bound by it.
func WithMaxHold(d time.Duration) Option {
	return func(o *options) { o.maxHold = d }
}

// WithMinHold keeps the name locked for at least d after the grant, also if it is released earlier: then nobody holds
// it, and nobody can take it until then. A job that takes 5 ms runs once a period on a fleet of skewed clocks if d is
// longer than the skew. Zero, the default, keeps nothing.
func WithMinHold(d time.Duration) Option {
	return func(o *options) { o.minHold = d }
}

// WithMaxHandoffs sets how often in a row a lock may be passed from one waiter of the process to the next without asking
// Redis: 16 times by default, and for one second at most. When it is known that no other process waits, a row may be
// longer, but not in time. Zero turns passing off: then each release is one in Redis. At most 1024.
func WithMaxHandoffs(n int) Option {
	return func(o *options) { o.handoffs = n }
}
