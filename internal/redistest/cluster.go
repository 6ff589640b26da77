package redistest

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
)

// slotCount is the number of hash slots of every cluster.
const slotCount = 16384

// Cluster is a Redis Cluster of primaries without replicas, each with an equal range of slots.
type Cluster struct {
	// Servers holds the nodes by the order of their slots.
	Servers []*Server
}

// StartCluster runs a cluster until the test ends. It takes about two seconds, the time for which a new node refuses to
// take part.
func StartCluster(tb testing.TB, kind Kind, primaries int) *Cluster {
	tb.Helper()
	c := &Cluster{}
	for range primaries {
		c.Servers = append(c.Servers, StartNode(tb, kind))
	}
	ctx, stop := context.WithTimeout(context.Background(), waitLimit)
	defer stop()
	if err := c.form(ctx); err != nil {
		tb.Fatal("redistest: cluster:", err)
	}
	return c
}

// StartNode runs a server that may become a node of a cluster.
func StartNode(tb testing.TB, kind Kind) *Server {
	tb.Helper()
	bus, err := freePort() // by default it is 10000 above the other, where there may be none
	if err != nil {
		tb.Fatal("redistest:", err)
	}
	return Start(tb, kind,
		"--cluster-enabled", "yes", "--cluster-port", bus, "--cluster-announce-ip", "127.0.0.1",
		"--cluster-node-timeout", "2000")
}

// form makes one cluster of the nodes, and returns when all of them see it whole.
func (c *Cluster) form(ctx context.Context) error {
	for i, s := range c.Servers {
		if err := c.join(ctx, i, s); err != nil {
			return err
		}
	}
	for _, s := range c.Servers {
		if err := poll(ctx, func() error { return c.whole(ctx, s) }); err != nil {
			return err
		}
	}
	return nil
}

// join gives the i-th node its slots and makes it known to the first.
func (c *Cluster) join(ctx context.Context, i int, s *Server) error {
	n := len(c.Servers)
	first, last := i*slotCount/n, (i+1)*slotCount/n-1
	if err := s.do(ctx, "CLUSTER", "ADDSLOTSRANGE", first, last); err != nil {
		return err
	}
	if err := s.do(ctx, "CLUSTER", "SET-CONFIG-EPOCH", i+1); err != nil {
		return err
	}
	if i == 0 {
		return nil
	}
	host, port, _ := net.SplitHostPort(s.addr)
	return c.Servers[0].do(ctx, "CLUSTER", "MEET", host, port, s.BusPort())
}

// whole returns nil when a node sees all the others and all slots.
func (c *Cluster) whole(ctx context.Context, s *Server) error {
	info, err := s.text(ctx, "CLUSTER", "INFO")
	if err != nil {
		return err
	}
	known := "cluster_known_nodes:" + strconv.Itoa(len(c.Servers)) + "\r"
	if !strings.Contains(info, "cluster_state:ok") || !strings.Contains(info, known) {
		return fmt.Errorf("%s is not ready:\n%s", s.addr, info)
	}
	return nil
}

// BusPort returns the port at which a node that was started by StartNode talks to others.
func (s *Server) BusPort() string { return s.arg("--cluster-port") }

// Addrs returns the addresses of all nodes.
func (c *Cluster) Addrs() []string {
	addrs := make([]string, 0, len(c.Servers))
	for _, s := range c.Servers {
		addrs = append(addrs, s.addr)
	}
	return addrs
}

// Client returns a client that the test closes.
func (c *Cluster) Client(tb testing.TB, opts ...func(*redis.ClusterOptions)) *redis.ClusterClient {
	tb.Helper()
	o := &redis.ClusterOptions{Addrs: c.Addrs()}
	for _, opt := range opts {
		opt(o)
	}
	client := redis.NewClusterClient(o)
	tb.Cleanup(func() { _ = client.Close() })
	return client
}
