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

const ttl = 10 * time.Second // of everybody's locks, unless a scenario says otherwise

// peer is a library, or a way to use one. open makes what a process has of it, on connections that w makes, if there is one. url is one server
// or, for those who can, several nodes, separated by commas.
type peer struct {
	name string
	open func(url string, w *wire) (*session, error)
}

// session takes and gives up locks. Each measurement has names of its own, as some leave theirs behind.
type session struct {
	lock  func(ctx context.Context, name string) (unlock func() error, err error)
	once  func(ctx context.Context, name string) error // both, without the function in between
	close func()
}

// What the peers are called. Short, as it is in every table.
const (
	us            = "lock"
	usFenced      = "lock, fencing"
	byRueidis     = "rueidislock"
	byRedislock   = "redislock"
	bySlowPolls   = "redislock, 100 ms polls"
	byFasterPolls = "redislock, 1 ms polls"
	byRedsync     = "redsync"
)

// waiting are those who can wait for a lock.
var waiting = []peer{
	{us, func(url string, w *wire) (*session, error) { return ours(url, w) }},
	{usFenced, func(url string, w *wire) (*session, error) { return ours(url, w, lock.WithFencing()) }},
	{byRueidis, func(url string, w *wire) (*session, error) { return openRueidislock(url, w, ttl) }},
	{byFasterPolls, func(url string, w *wire) (*session, error) { return openRedislock(url, w, time.Millisecond) }},
	{bySlowPolls, func(url string, w *wire) (*session, error) { return openRedislock(url, w, 100*time.Millisecond) }},
	{byRedsync, openRedsync},
}

// others are the libraries that a free lock is taken with: how they wait makes no difference then.
var others = []peer{
	{byRedislock, func(url string, w *wire) (*session, error) { return openRedislock(url, w, time.Millisecond) }},
	{byRedsync, openRedsync},
	{byRueidis, func(url string, w *wire) (*session, error) { return openRueidislock(url, w, ttl) }},
}

func peerOf(name string) peer {
	for _, p := range waiting {
		if p.name == name {
			return p
		}
	}
	return peer{}
}

// nodes returns a client for each URL.
func nodes(urls string, w *wire) (clients []redis.UniversalClient, closeAll func(), err error) {
	closeAll = func() {
		for _, c := range clients {
			_ = c.Close()
		}
	}
	for url := range strings.SplitSeq(urls, ",") {
		rdb, err := goRedis(url, w)
		if err != nil {
			closeAll()
			return nil, nil, err
		}
		clients = append(clients, rdb)
	}
	return clients, closeAll, nil
}

// goRedis returns the client that all of go-redis's users have here.
func goRedis(url string, w *wire) (*redis.Client, error) {
	o, err := redis.ParseURL(url)
	if err != nil {
		return nil, err
	}
	o.ContextTimeoutEnabled = true
	if w != nil {
		o.Dialer = w.dial
	}
	return redis.NewClient(o), nil
}

func ours(url string, w *wire, opts ...lock.Option) (*session, error) {
	clients, closeAll, err := nodes(url, w)
	if err != nil {
		return nil, err
	}
	s := oursOn(newLocker(clients, append([]lock.Option{lock.WithTTL(ttl)}, opts...)...))
	wait := s.close
	s.close = func() {
		wait()
		closeAll()
	}
	return s, nil
}

func oursOn(l *lock.Locker) *session {
	return &session{
		lock: func(ctx context.Context, name string) (func() error, error) {
			lk, err := l.Acquire(ctx, name)
			if err != nil {
				return nil, err
			}
			return func() error { return lk.Release(context.Background()) }, nil
		},
		once: func(ctx context.Context, name string) error {
			lk, err := l.Acquire(ctx, name)
			if err != nil {
				return err
			}
			return lk.Release(ctx)
		},
		close: func() {
			// Clean-ups after attempts that were cut off go on for a TTL; nobody uses the names again.
			ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
			defer cancel()
			_ = l.Wait(ctx)
		},
	}
}

func newLocker(clients []redis.UniversalClient, opts ...lock.Option) *lock.Locker {
	if len(clients) == 1 {
		return lock.New(clients[0], opts...)
	}
	return redlock.New(clients, opts...)
}

func openRedislock(url string, w *wire, poll time.Duration) (*session, error) {
	rdb, err := goRedis(url, w)
	if err != nil {
		return nil, err
	}
	l := redislock.New(rdb)
	o := &redislock.Options{RetryStrategy: redislock.LinearBackoff(poll)}
	return &session{
		lock: func(ctx context.Context, name string) (func() error, error) {
			lk, err := l.Obtain(ctx, name, ttl, o)
			if err != nil {
				return nil, err
			}
			return func() error { return lk.Release(context.Background()) }, nil
		},
		once: func(ctx context.Context, name string) error {
			lk, err := l.Obtain(ctx, name, ttl, o)
			if err != nil {
				return err
			}
			return lk.Release(ctx)
		},
		close: func() { _ = rdb.Close() },
	}, nil
}

func openRedsync(url string, w *wire) (*session, error) {
	clients, closeAll, err := nodes(url, w)
	if err != nil {
		return nil, err
	}
	pools := make([]redsyncredis.Pool, len(clients))
	for i, c := range clients {
		pools[i] = goredis.NewPool(c)
	}
	rs := redsync.New(pools...)
	mutex := func(name string) *redsync.Mutex {
		return rs.NewMutex(name, redsync.WithExpiry(ttl), redsync.WithTries(1<<30))
	}
	return &session{
		lock: func(ctx context.Context, name string) (func() error, error) {
			m := mutex(name)
			if err := m.LockContext(ctx); err != nil {
				return nil, err
			}
			return func() error {
				_, err := m.Unlock()
				return err
			}, nil
		},
		once: func(ctx context.Context, name string) error {
			m := mutex(name)
			if err := m.LockContext(ctx); err != nil {
				return err
			}
			_, err := m.UnlockContext(ctx)
			return err
		},
		close: closeAll,
	}, nil
}

func openRueidislock(url string, w *wire, ttl time.Duration) (*session, error) {
	o, err := rueidis.ParseURL(url)
	if err != nil {
		return nil, err
	}
	if w != nil {
		o.DialCtxFn = func(ctx context.Context, addr string, _ *net.Dialer, _ *tls.Config) (net.Conn, error) {
			return w.dial(ctx, "tcp", addr)
		}
	}
	l, err := rueidislock.NewLocker(rueidislock.LockerOption{
		ClientOption: o, KeyMajority: 1, KeyValidity: ttl, NoLoopTracking: true,
		TryNextAfter: time.Second, // after the 20 ms of the default it gives up, and then waits for what nobody sends
	})
	if err != nil {
		return nil, err
	}
	return &session{
		lock: func(ctx context.Context, name string) (func() error, error) {
			_, cancel, err := l.WithContext(ctx, name)
			if err != nil {
				return nil, err
			}
			return func() error {
				cancel()
				return nil
			}, nil
		},
		once: func(ctx context.Context, name string) error {
			_, cancel, err := l.WithContext(ctx, name)
			if err == nil {
				cancel()
			}
			return err
		},
		close: l.Close,
	}, nil
}
