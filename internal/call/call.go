// Package call sends commands through go-redis so that two things hold that the client does not promise by itself:
// a command is sent at most once, and a caller waits no longer than its context lives.
//
// How the second is reached depends on the client. With ContextTimeoutEnabled the command runs in the caller's own
// goroutine under a deadline. Without it go-redis does not look at the context while it reads, so the command runs in
// a goroutine of its own and the caller leaves when its context ends. A context that can't end needs neither. Where there are
// many commands at a time a Batcher sends them together, from goroutines of its own.
package call

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// Limit is how long one command may take; later answers are not waited for. It is also the time within which a
	// cancellation is obeyed on a client with ContextTimeoutEnabled, where only a deadline can interrupt a read. It does
	// not hold for a context that can't end on a client without ContextTimeoutEnabled: there the client's own timeouts do.
	Limit = time.Second

	// grace is what a caller without ContextTimeoutEnabled stays beyond its context's end: a reply that is already on
	// its way makes the outcome known, which spares everybody a clean-up.
	grace = 20 * time.Millisecond
)

// Client sends commands. It is safe for concurrent use. Clients on one go-redis client are equal.
type Client struct {
	rdb    redis.UniversalClient
	inline bool // the client obeys deadlines by itself
}

// New returns a Client that sends through rdb. It panics on what can't carry a lock, with a message that says why.
func New(rdb redis.UniversalClient) Client {
	if rdb == nil {
		panic("lock: nil Redis client")
	}
	if v := reflect.ValueOf(rdb); v.Kind() == reflect.Pointer && v.IsNil() {
		panic("lock: nil Redis client")
	}
	if !reflect.ValueOf(rdb).Comparable() {
		panic("lock: a Redis client must be comparable; use a pointer")
	}
	switch rdb.(type) {
	case *redis.Ring:
		panic("lock: redis.Ring moves a name to another server when one is slow or down, so two holders could meet")
	case *redis.AutoPipeliner:
		panic("lock: redis.AutoPipeliner delays and regroups commands; pass the client it was made from")
	}
	return Client{rdb: rdb, inline: obeysDeadlines(rdb)}
}

// obeysDeadlines tells whether rdb sets its socket deadlines from the context. A ReadTimeout of -2 switches socket
// deadlines off altogether.
func obeysDeadlines(rdb redis.UniversalClient) bool {
	switch c := rdb.(type) {
	case interface{ Options() *redis.Options }:
		o := c.Options()
		return o.ContextTimeoutEnabled && o.ReadTimeout >= 0 && o.WriteTimeout >= 0
	case interface{ Options() *redis.ClusterOptions }:
		o := c.Options()
		return o.ContextTimeoutEnabled && o.ReadTimeout >= 0 && o.WriteTimeout >= 0
	}
	return false
}

// Process sends m, which may take as long as limit or, if that is zero, Limit. The error is the command's own, or says
// that the caller left; ClassOf tells what it means for the outcome. If it is an *Abandoned, the command may still run:
// its reply must not be read.
func (c Client) Process(ctx context.Context, m *Message, limit time.Duration) error {
	err := c.process(ctx, m, limit)
	c.heed(ctx, err)
	return err
}

func (c Client) process(ctx context.Context, m *Message, limit time.Duration) error {
	free := limit == 0 && ctx.Done() == nil
	if limit == 0 {
		limit = Limit
	}
	switch {
	case ctx.Err() != nil:
		return &Abandoned{cause: ContextError(ctx), unsent: true}
	case c.inline:
		return c.inPlace(ctx, m, limit)
	case free:
		return c.rdb.Process(ctx, m)
	default:
		return detached(ctx, limit, func(ctx context.Context) error { return c.rdb.Process(ctx, m) })
	}
}

// inPlace sends m in the caller's goroutine.
func (c Client) inPlace(ctx context.Context, m *Message, limit time.Duration) error {
	m.read = false
	m.room.reset(ctx, limit)
	err := c.rdb.Process(&m.room, m)
	if m.room.stop != nil {
		m.room.stop()
	}
	if err = endOf(ctx, err); err == nil {
		return nil
	}
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil && !time.Now().Before(m.room.limit) {
		err = errLimit(limit)
	}
	if !m.read {
		return &Abandoned{cause: err, unsent: true}
	}
	return err
}

// Pipeline sends cmds in one round trip, in a goroutine of its own, and waits as long as ctx lets it. The error is that
// of the whole; each command has its own, but none has one if the whole was refused before it was sent. The warning of
// Process about abandoned commands holds here too.
func (c Client) Pipeline(ctx context.Context, cmds []redis.Cmder) error {
	err := detached(ctx, forever, func(ctx context.Context) error {
		pipe := c.rdb.Pipeline()
		for _, cmd := range cmds {
			_ = pipe.Process(ctx, cmd) // only queues
		}
		_, err := pipe.Exec(ctx)
		return err
	})
	c.heed(ctx, err)
	return err
}

// heed has a cluster client look where the primaries are, after an error that is no server's. go-redis does that by itself
// only when a server says so, and once a minute: where a primary has died it would go on asking that one.
func (c Client) heed(ctx context.Context, err error) {
	if err == nil || errors.Is(ctx.Err(), context.Canceled) {
		return
	}
	var reply redis.Error
	if cluster, ok := c.rdb.(interface{ ReloadState(context.Context) }); ok && !errors.As(err, &reply) {
		cluster.ReloadState(context.WithoutCancel(ctx)) // in the background, and a few times a second at most
	}
}

// Node returns something that is equal for keys served by the same primary, as far as the client knows: a hint for
// grouping, not for routing.
func (c Client) Node(ctx context.Context, key string) any {
	cluster, ok := c.rdb.(interface {
		MasterForKey(context.Context, string) (*redis.Client, error)
	})
	if !ok {
		return nil
	}
	node, err := cluster.MasterForKey(ctx, key)
	if err != nil {
		return nil
	}
	return node
}

const forever = time.Duration(math.MaxInt64)

// detached lets send run on when ctx ends or the limit is over; but if it has not got a connection by then, it won't
// send any more.
func detached(ctx context.Context, limit time.Duration, send func(context.Context) error) error {
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	result := make(chan error, 1)
	go func() { result <- send(inner) }()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case err := <-result:
		return endOf(ctx, err)
	case <-timer.C:
		return &Abandoned{cause: errLimit(limit)}
	case <-ctx.Done():
		timer.Reset(grace)
	}
	select {
	case err := <-result:
		return endOf(ctx, err)
	case <-timer.C:
		return &Abandoned{cause: ContextError(ctx)}
	}
}

func errLimit(limit time.Duration) error { return fmt.Errorf("no answer within %v", limit) }

// endOf turns the i/o timeout that a deadline causes into the context's own error. The socket's deadline may strike a
// moment before the context's timer does, so the clock decides. A server's answer is left as it is.
func endOf(ctx context.Context, err error) error {
	if err == nil || ClassOf(err) != Unknown {
		return err
	}
	if ctx.Err() != nil {
		return &Abandoned{cause: fmt.Errorf("%w: %w", ContextError(ctx), err)}
	}
	if d, ok := ctx.Deadline(); ok && !time.Now().Before(d) {
		return &Abandoned{cause: fmt.Errorf("%w: %w", context.DeadlineExceeded, err)}
	}
	return err
}

// ContextError is ctx.Err(), joined with the cause where that is another error.
func ContextError(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if err == cause {
		return err
	}
	return fmt.Errorf("%w: %w", err, cause)
}

// limited is a context with an earlier deadline. go-redis takes the deadlines of sockets from it without a timer; one
// is made only if go-redis has to wait for a connection.
type limited struct {
	context.Context
	limit time.Time

	mu    sync.Mutex
	asked bool
	timed context.Context // with a timer; nil until it is needed
	stop  context.CancelFunc
}

func (c *limited) reset(ctx context.Context, limit time.Duration) {
	c.Context, c.limit = ctx, time.Now().Add(limit)
	c.asked, c.timed, c.stop = false, nil, nil
}

// Deadline returns the earlier of the context's own deadline and the limit.
func (c *limited) Deadline() (time.Time, bool) {
	if d, ok := c.Context.Deadline(); ok && d.Before(c.limit) {
		return d, true
	}
	return c.limit, true
}

// Done returns the context's own channel when go-redis asks first, which it does to look whether the context has ended;
// it asks again when it waits.
func (c *limited) Done() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.asked {
		c.asked = true
		return c.Context.Done()
	}
	if c.timed == nil {
		c.timed, c.stop = context.WithDeadline(c.Context, c.limit)
	}
	return c.timed.Done()
}

// Err tells the limit's end too.
func (c *limited) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.timed != nil {
		return c.timed.Err()
	}
	return c.Context.Err()
}

// Message is a go-redis command on its way. Embed it next to the arguments: one allocation then holds all.
type Message struct {
	redis.Cmder
	room limited // the context that the command is sent with
	read bool    // go-redis has asked for the arguments: from then on the command may have been sent
}

// NoRetry reports true: go-redis, which asks each command, must not send it again, as that makes outcomes ambiguous.
func (*Message) NoRetry() bool { return true }

// Args returns the arguments. Nothing has been sent before go-redis asked for them.
func (m *Message) Args() []any {
	m.read = true
	return m.Cmder.Args()
}
