package main

import (
	"context"
	"crypto/tls"
	"net"
	"strings"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	redsyncredis "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/redlock"
)

const ttl = 10 * time.Second

// peer is a library, or a way to use one. open makes what a process has of it, on connections that wire makes, if there is one. addr is one
// server or, for those who can, several nodes, separated by commas. Each measurement has a key of its own, as some
// leave theirs behind.
type peer struct {
	name string
	open func(addr, key string, w *wire) (*session, error)
}

// session takes and gives up the lock.
type session struct {
	lock  func(ctx context.Context) (unlock func() error, err error)
	close func()
}

var peers = []peer{
	{"lock", func(addr, key string, w *wire) (*session, error) { return ours(addr, key, w) }},
	{"lock, fencing", func(addr, key string, w *wire) (*session, error) {
		return ours(addr, key, w, lock.WithFencing())
	}},
	{"rueidislock", openRueidislock},
	{"redislock, 1 ms polls", func(addr, key string, w *wire) (*session, error) {
		return openRedislock(addr, key, w, time.Millisecond)
	}},
	{"redislock, 100 ms polls", func(addr, key string, w *wire) (*session, error) {
		return openRedislock(addr, key, w, 100*time.Millisecond)
	}},
	{"redsync", openRedsync},
}

func find(name string) peer {
	for _, p := range peers {
		if p.name == name {
			return p
		}
	}
	return peer{}
}

// nodes returns a client for each address.
func nodes(addr string, w *wire) (clients []redis.UniversalClient, closeAll func()) {
	for a := range strings.SplitSeq(addr, ",") {
		clients = append(clients, goRedis(a, w))
	}
	return clients, func() {
		for _, c := range clients {
			_ = c.Close()
		}
	}
}

func goRedis(addr string, w *wire) *redis.Client {
	o := &redis.Options{Addr: addr, ContextTimeoutEnabled: true}
	if w != nil {
		o.Dialer = w.dial
	}
	return redis.NewClient(o)
}

func ours(addr, key string, w *wire, opts ...lock.Option) (*session, error) {
	clients, closeAll := nodes(addr, w)
	l := newLocker(clients, append(opts, lock.WithTTL(ttl))...)
	return &session{
		lock: func(ctx context.Context) (func() error, error) {
			lk, err := l.Acquire(ctx, key)
			if err != nil {
				return nil, err
			}
			return func() error { return lk.Release(context.Background()) }, nil
		},
		close: func() {
			ctx, cancel := context.WithTimeout(context.Background(), 2*ttl)
			defer cancel()
			_ = l.Wait(ctx)
			closeAll()
		},
	}, nil
}

func newLocker(clients []redis.UniversalClient, opts ...lock.Option) *lock.Locker {
	if len(clients) == 1 {
		return lock.New(clients[0], opts...)
	}
	return redlock.New(clients, opts...)
}

func openRedislock(addr, key string, w *wire, poll time.Duration) (*session, error) {
	rdb := goRedis(addr, w)
	l := redislock.New(rdb)
	return &session{
		lock: func(ctx context.Context) (func() error, error) {
			lk, err := l.Obtain(ctx, key, ttl, &redislock.Options{RetryStrategy: redislock.LinearBackoff(poll)})
			if err != nil {
				return nil, err
			}
			return func() error { return lk.Release(context.Background()) }, nil
		},
		close: func() { _ = rdb.Close() },
	}, nil
}

func openRedsync(addr, key string, w *wire) (*session, error) {
	clients, closeAll := nodes(addr, w)
	pools := make([]redsyncredis.Pool, len(clients))
	for i, c := range clients {
		pools[i] = goredis.NewPool(c)
	}
	rs := redsync.New(pools...)
	return &session{
		lock: func(ctx context.Context) (func() error, error) {
			m := rs.NewMutex(key, redsync.WithExpiry(ttl), redsync.WithTries(1<<30))
			if err := m.LockContext(ctx); err != nil {
				return nil, err
			}
			return func() error {
				_, err := m.Unlock()
				return err
			}, nil
		},
		close: closeAll,
	}, nil
}

func openRueidislock(addr, key string, w *wire) (*session, error) {
	l, err := rueidislock.NewLocker(rueidislock.LockerOption{
		ClientOption: rueidis.ClientOption{
			InitAddress: []string{addr},
			DialCtxFn: func(ctx context.Context, addr string, _ *net.Dialer, _ *tls.Config) (net.Conn, error) {
				return w.dial(ctx, "tcp", addr)
			},
		},
		KeyMajority: 1, KeyValidity: ttl, NoLoopTracking: true,
	})
	if err != nil {
		return nil, err
	}
	return &session{
		lock: func(ctx context.Context) (func() error, error) {
			_, cancel, err := l.WithContext(ctx, key)
			if err != nil {
				return nil, err
			}
			return func() error {
				cancel()
				return nil
			}, nil
		},
		close: l.Close,
	}, nil
}
