package main

import (
	"context"
	"errors"
	"fmt"
	neturl "net/url"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
)

// server is the Redis of a run.
type server struct {
	url      string // empty for the embedded one
	name     string // for people: no password in it
	options  *redis.Options
	embedded *miniredis.Miniredis
}

// connect reaches the Redis at the url, or starts one inside this process if that is empty.
func connect(ctx context.Context, url string) (*server, error) {
	s := &server{url: url}
	if url == "" {
		s.embedded = miniredis.NewMiniRedis()
		s.embedded.ClockTTL(true) // keys expire as time passes
		if err := s.embedded.Start(); err != nil {
			return nil, fmt.Errorf("can't start the embedded server: %w", err)
		}
		s.name, url = "embedded (miniredis)", "redis://"+s.embedded.Addr()
	}
	var err error
	if s.options, err = parseURL(url); err != nil {
		return nil, err
	}
	if s.embedded == nil {
		s.name = fmt.Sprintf("%s, database %d", s.options.Addr, s.options.DB)
	}
	rdb := s.client()
	defer rdb.Close()
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if err := rdb.Ping(ctx).Err(); err != nil {
		s.close()
		return nil, fmt.Errorf("can't reach Redis at %s: %w", s.options.Addr, err)
	}
	return s, nil
}

func parseURL(url string) (*redis.Options, error) {
	options, err := redis.ParseURL(url)
	if urlErr := new(neturl.Error); errors.As(err, &urlErr) {
		err = errors.New("not redis://[user:password@]host:port[/db]") // urlErr has the password in it
	}
	if err != nil {
		return nil, fmt.Errorf("REDIS_URL: %w", err)
	}
	// go-redis obeys the deadlines of contexts only if it is told to. The lock works either way; this is cheaper.
	options.ContextTimeoutEnabled = true
	options.DialTimeout = 2 * time.Second
	options.DialerRetries = 1
	return options, nil
}

// client returns a new client. A process needs only one; here each worker has its own, as if it were on a machine of
// its own.
func (s *server) client(change ...func(*redis.Options)) *redis.Client {
	options := *s.options
	for _, f := range change {
		f(&options)
	}
	return redis.NewClient(&options)
}

func (s *server) workerKind() string {
	if s.embedded != nil {
		return "goroutines"
	}
	return "processes"
}

func (s *server) close() {
	if s.embedded != nil {
		s.embedded.Close()
	}
}

func init() { redis.SetLogger(quiet{}) }

// quiet drops what go-redis logs: errors are reported once, where they are returned.
type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}
