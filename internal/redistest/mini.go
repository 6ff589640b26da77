package redistest

import (
	"context"
	"net"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
)

// noAddr is what clients that bring their own dialer are told to connect to. It must be a literal: a host name is looked
// up by NewClient, which is fatal in the second bubble of a process.
const noAddr = "127.0.0.1:6379"

// Mini returns an in-memory Redis whose keys expire by time.Now, which is virtual inside a synctest bubble. It listens
// on no port: connect with [MiniClient] or [ProxyMini].
func Mini(tb testing.TB) *miniredis.Miniredis {
	tb.Helper()
	m := miniredis.NewMiniRedis()
	m.ClockTTL(true)
	tb.Cleanup(m.Close)
	return m
}

// MiniClient returns a client of m that works inside and outside of a bubble. It carries pipelines of any length.
// Waiting for its pool does not work in two bubbles of one process, because go-redis reuses timers between them: a test
// that exhausts the pool belongs outside.
func MiniClient(tb testing.TB, m *miniredis.Miniredis, opts ...func(*redis.Options)) *redis.Client {
	tb.Helper()
	return newClient(tb, noAddr, func(ctx context.Context, _, _ string) (net.Conn, error) { return dialMini(ctx, m) }, opts)
}

func dialMini(ctx context.Context, m *miniredis.Miniredis) (net.Conn, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	conn, err := m.Dial()
	if err != nil {
		return nil, err
	}
	return buffered(conn), nil
}

type dialer = func(ctx context.Context, network, addr string) (net.Conn, error)

// newClient makes a client that the test closes. A nil dial is the client's own.
func newClient(tb testing.TB, addr string, dial dialer, opts []func(*redis.Options)) *redis.Client {
	tb.Helper()
	o := &redis.Options{Addr: addr, Dialer: dial, PoolSize: 20} // also on a machine of one core: see MiniClient
	for _, opt := range opts {
		opt(o)
	}
	client := redis.NewClient(o)
	tb.Cleanup(func() { _ = client.Close() })
	return client
}
