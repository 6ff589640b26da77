package lock_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/internal/keys"
	"github.com/seed-b640e7e9/lock/internal/locktest"
	"github.com/seed-b640e7e9/lock/internal/redistest"
)

// backend runs the conformance suite on what client connects to, with a client for each Locker. direct goes behind the
// library's back.
func backend(direct redis.UniversalClient, client func(t *testing.T) redis.UniversalClient) locktest.Backend {
	ctx := context.Background()
	return locktest.Backend{
		New: func(t *testing.T, opts ...lock.Option) *lock.Locker {
			t.Helper()
			return lock.New(client(t), opts...)
		},
		Delete: func(t *testing.T, name string) {
			t.Helper()
			require.NoError(t, direct.Del(ctx, keys.Lock("", name)).Err())
		},
		Overwrite: func(t *testing.T, name string) {
			t.Helper()
			require.NoError(t, direct.Set(ctx, keys.Lock("", name), "another", time.Minute).Err())
		},
		SetFence: func(t *testing.T, name string, n lock.Fence) {
			t.Helper()
			require.NoError(t, direct.Set(ctx, keys.Fence("", name), int64(n), 0).Err())
		},
	}
}

func TestConformanceOnMiniredisInVirtualTime(t *testing.T) {
	for _, inline := range []bool{false, true} {
		t.Run(fmt.Sprintf("ContextTimeoutEnabled=%v", inline), func(t *testing.T) {
			locktest.RunInBubbles(t, func(t *testing.T) locktest.Backend {
				m := redistest.Mini(t)
				client := func(t *testing.T) redis.UniversalClient {
					return redistest.MiniClient(t, m, func(o *redis.Options) {
						o.ContextTimeoutEnabled = inline
						o.PoolSize = 500 // waiting for the pool does not work in two bubbles of one process
					})
				}
				return backend(client(t), client)
			})
		})
	}
}

func TestConformanceOnServers(t *testing.T) {
	for _, kind := range redistest.Kinds() {
		for i, protocol := range []int{2, 3} {
			inline := i == 0
			t.Run(fmt.Sprintf("%v/RESP%d/ContextTimeoutEnabled=%v", kind, protocol, inline), func(t *testing.T) {
				t.Parallel()
				server := redistest.Shared(t, kind)
				client := func(t *testing.T) redis.UniversalClient {
					return server.Client(t, func(o *redis.Options) {
						o.Protocol, o.ContextTimeoutEnabled = protocol, inline
					})
				}
				locktest.Run(t, func(t *testing.T) locktest.Backend { return backend(client(t), client) })
			})
		}
	}
}

func TestConformanceOnACluster(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, redistest.Redis7, 3)
	for i, protocol := range []int{3, 2} {
		inline := i == 0
		t.Run(fmt.Sprintf("RESP%d/ContextTimeoutEnabled=%v", protocol, inline), func(t *testing.T) {
			client := func(t *testing.T) redis.UniversalClient {
				return cluster.Client(t, func(o *redis.ClusterOptions) {
					o.Protocol, o.ContextTimeoutEnabled = protocol, inline
				})
			}
			locktest.Run(t, func(t *testing.T) locktest.Backend { return backend(client(t), client) })
		})
	}
}

func TestConformanceBehindSentinel(t *testing.T) {
	t.Parallel()
	sentinel := redistest.StartSentinel(t)
	for i, protocol := range []int{3, 2} {
		inline := i == 0
		t.Run(fmt.Sprintf("RESP%d/ContextTimeoutEnabled=%v", protocol, inline), func(t *testing.T) {
			client := func(t *testing.T) redis.UniversalClient {
				return sentinel.Client(t, func(o *redis.FailoverOptions) {
					o.Protocol, o.ContextTimeoutEnabled = protocol, inline
				})
			}
			locktest.Run(t, func(t *testing.T) locktest.Backend { return backend(client(t), client) })
		})
	}
}
