package redistest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
)

// SentinelName is what the sentinel of [StartSentinel] calls what it watches.
const SentinelName = "main"

// Sentinel is a primary with one replica, and one sentinel that decides alone which is which.
type Sentinel struct {
	// Sentinel is the sentinel itself.
	Sentinel *Server

	data []*Server
}

// StartSentinel runs a sentinel and what it watches, of kind [Redis7], until the test ends. The sentinel takes a primary
// for dead after one second without an answer.
func StartSentinel(tb testing.TB) *Sentinel {
	tb.Helper()
	primary := Start(tb, Redis7, "--repl-diskless-sync-delay", "0")
	host, port, _ := net.SplitHostPort(primary.addr)
	replica := Start(tb, Redis7, "--replicaof", host+" "+port, "--repl-diskless-sync-delay", "0")
	ctx, stop := context.WithTimeout(context.Background(), waitLimit)
	defer stop()
	// A sentinel that meets a replica before its link is up looks at it again only ten seconds later.
	if err := poll(ctx, func() error { return replica.sees(ctx, "master_link_status:up") }); err != nil {
		tb.Fatal("redistest: replica:", err)
	}
	if err := poll(ctx, func() error { return primary.sees(ctx, "state=online") }); err != nil {
		tb.Fatal("redistest: primary:", err)
	}
	s := &Sentinel{Sentinel: startSentinel(tb, host, port), data: []*Server{primary, replica}}
	if err := poll(ctx, func() error { return s.knowsReplica(ctx) }); err != nil {
		tb.Fatal("redistest: sentinel:", err)
	}
	return s
}

func startSentinel(tb testing.TB, host, port string) *Server {
	tb.Helper()
	dir := tb.TempDir()
	conf := filepath.Join(dir, confFile) // it writes what it learns into it
	text := fmt.Sprintf(`sentinel monitor %[1]s %[2]s %[3]s 1
sentinel down-after-milliseconds %[1]s 1000
sentinel failover-timeout %[1]s 5000
`, SentinelName, host, port)
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		tb.Fatal("redistest:", err)
	}
	return startIn(tb, Redis7, dir, []string{"--sentinel"})
}

func (s *Server) sees(ctx context.Context, text string) error {
	info, err := s.text(ctx, "INFO", "replication")
	if err == nil && !strings.Contains(info, text) {
		err = fmt.Errorf("%s: no %q in %s", s.addr, text, info)
	}
	return err
}

func (s *Sentinel) knowsReplica(ctx context.Context) error {
	list, err := s.Sentinel.command(ctx, "SENTINEL", "REPLICAS", SentinelName).Slice()
	if err == nil && len(list) == 0 {
		err = errors.New("it has not found the replica")
	}
	return err
}

// Client returns a client that asks the sentinel where the primary is, and that the test closes.
func (s *Sentinel) Client(tb testing.TB, opts ...func(*redis.FailoverOptions)) *redis.Client {
	tb.Helper()
	o := &redis.FailoverOptions{MasterName: SentinelName, SentinelAddrs: []string{s.Sentinel.addr}}
	for _, opt := range opts {
		opt(o)
	}
	client := redis.NewFailoverClient(o)
	tb.Cleanup(func() { _ = client.Close() })
	return client
}

// Primary returns the server that the sentinel says is the primary.
func (s *Sentinel) Primary(tb testing.TB) *Server {
	tb.Helper()
	ctx, stop := context.WithTimeout(context.Background(), waitLimit)
	defer stop()
	primary, err := s.primary(ctx)
	if err != nil {
		tb.Fatal("redistest: sentinel:", err)
	}
	return primary
}

// Replica returns the other server.
func (s *Sentinel) Replica(tb testing.TB) *Server {
	tb.Helper()
	if s.Primary(tb) == s.data[0] {
		return s.data[1]
	}
	return s.data[0]
}

func (s *Sentinel) primary(ctx context.Context) (*Server, error) {
	at, err := s.Sentinel.command(ctx, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SentinelName).StringSlice()
	if err != nil {
		return nil, err
	}
	for _, d := range s.data {
		if len(at) == 2 && d.addr == net.JoinHostPort(at[0], at[1]) {
			return d, nil
		}
	}
	return nil, fmt.Errorf("the primary is said to be at %q", at)
}

// Failover makes the replica the primary, and returns when the sentinel says so and the server itself does. The old
// primary becomes a replica a little later.
func (s *Sentinel) Failover(tb testing.TB) {
	tb.Helper()
	old := s.Primary(tb)
	ctx, stop := context.WithTimeout(context.Background(), waitLimit)
	defer stop()
	demand := func() error { return s.Sentinel.do(ctx, "SENTINEL", "FAILOVER", SentinelName) }
	if err := poll(ctx, demand); err != nil {
		tb.Fatal("redistest: failover:", err)
	}
	if err := s.awaitOther(ctx, old); err != nil {
		tb.Fatal("redistest: failover:", err)
	}
}

// AwaitFailover returns when the sentinel has replaced old, a primary that the test has killed or paused.
func (s *Sentinel) AwaitFailover(tb testing.TB, old *Server) {
	tb.Helper()
	ctx, stop := context.WithTimeout(context.Background(), waitLimit)
	defer stop()
	if err := s.awaitOther(ctx, old); err != nil {
		tb.Fatal("redistest: failover:", err)
	}
}

func (s *Sentinel) awaitOther(ctx context.Context, old *Server) error {
	return poll(ctx, func() error {
		now, err := s.primary(ctx)
		if err != nil {
			return err
		}
		if now == old {
			return errors.New("the primary is still the same")
		}
		return now.sees(ctx, "role:master")
	})
}
