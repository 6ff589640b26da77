package main

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/bench/internal/report"
)

// onCluster compares a cluster of three primaries with one server on the same machine.
func onCluster(ctx context.Context, c config) (report.Section, error) {
	s := report.Section{
		Title: "Redis Cluster: three primaries beside one server",
		Text: fmt.Sprintf("All servers are on this machine and share its cores, so three are no faster than one here: what counts is that a cluster costs nothing "+
			"beyond what raw commands on it cost. Throughput of %d goroutines on distinct names in %d rounds, in random order; then one goroutine, in pairs of rounds.", crowd, c.rounds),
	}
	primaries, stop, err := startCluster(ctx, 3)
	if err != nil {
		return s, err
	}
	defer stop()
	three := redis.NewClusterClient(&redis.ClusterOptions{Addrs: primaries, ContextTimeoutEnabled: true})
	defer three.Close()
	one, err := client(c.url, true)
	if err != nil {
		return s, err
	}
	defer one.Close()
	busy, chart, err := clusterThroughput(ctx, c, one, three)
	if err != nil {
		return s, err
	}
	single, err := clusterPairs(ctx, c, one, three)
	s.Tables, s.Charts = []report.Table{busy, single}, []report.Chart{chart}
	return s, err
}

func clusterThroughput(ctx context.Context, c config, one, three redis.UniversalClient) (report.Table, report.Chart, error) {
	t := report.Table{Head: []string{"", "operations a second", "of raw, one server", "of raw, three primaries", "stalls"}}
	chart := report.Chart{Name: "cluster", Title: "Acquire and release, 64 goroutines: one server, three primaries", Y: "operations a second"}
	raw := func(rdb redis.UniversalClient) func(context.Context, string) error {
		return func(ctx context.Context, name string) error { return rawOnce(ctx, rdb, name) }
	}
	runners := []runner{
		{"raw, one server", raw(one)},
		{"raw, three primaries", raw(three)},
		{"lock, one server", oursOn(lock.New(one)).once},
		{"lock, three primaries", oursOn(lock.New(three)).once},
		{"lock, fencing, three primaries", oursOn(lock.New(three, lock.WithFencing())).once},
	}
	rates, err := inRounds(ctx, c, runners)
	if err != nil {
		return t, chart, err
	}
	rates, stalls := withoutStalls(rates)
	bars := report.Series{Name: "operations a second"}
	for i, r := range runners {
		rate := median(rates[i]).Center
		t.Add(r.name, fmt.Sprintf("%.0f", rate), interval(ratios(rates[i], rates[0]), 2), interval(ratios(rates[i], rates[1]), 2), fmt.Sprint(stalls[i]))
		chart.Labels = append(chart.Labels, r.name)
		bars.Add(0, rate)
	}
	chart.Series = []report.Series{bars}
	return t, chart, nil
}

func clusterPairs(ctx context.Context, c config, one, three redis.UniversalClient) (report.Table, error) {
	t := report.Table{Text: "One goroutine:", Head: []string{"", "time", "CPU time", "time"}}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	rawOne, rawThree := contestant{"raw, one server", rawPair(ctx, one)}, contestant{"raw, three primaries", rawPair(ctx, three)}
	lockOne := contestant{"lock, one server", lockPair(ctx, lock.New(one), newName())}
	lockThree := contestant{"lock, three primaries", lockPair(ctx, lock.New(three), newName())}
	for _, p := range [][2]contestant{{rawThree, rawOne}, {lockThree, lockOne}, {lockThree, rawThree}} {
		r, err := compare(ctx, max(c.pairs/4, 10), c.ops, p[0], p[1])
		if err != nil {
			return t, err
		}
		t.Add(p[0].name+" / "+p[1].name, interval(r.time, 3), interval(r.cpu, 2), brief(r.each))
	}
	return t, nil
}

const slots = 16384

// startCluster runs primaries without replicas, each with an equal share of the slots, and returns their addresses.
func startCluster(ctx context.Context, n int) (addrs []string, stop func(), err error) {
	servers, _, stop, err := startServers(ctx, n, "--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
	if err != nil {
		return nil, nil, err
	}
	if addrs, err = form(ctx, servers); err != nil {
		stop()
		return nil, nil, err
	}
	return addrs, stop, nil
}

// form makes one cluster of servers, and returns when all of them see it whole.
func form(ctx context.Context, servers []*local) ([]string, error) {
	var addrs []string
	for i, s := range servers {
		u, err := url.Parse(s.url)
		if err != nil {
			return nil, err
		}
		addrs = append(addrs, u.Host)
		if err := join(ctx, i, len(servers), u.Host, addrs[0]); err != nil {
			return nil, err
		}
	}
	for _, addr := range addrs {
		if err := whole(ctx, addr, len(servers)); err != nil {
			return nil, err
		}
	}
	return addrs, nil
}

// join gives the i-th of n nodes its slots, and makes it known to the first.
func join(ctx context.Context, i, n int, addr, first string) error {
	rdb := redis.NewClient(&redis.Options{Addr: addr})
	defer rdb.Close()
	if err := rdb.ClusterAddSlotsRange(ctx, i*slots/n, (i+1)*slots/n-1).Err(); err != nil {
		return err
	}
	if err := rdb.Do(ctx, "CLUSTER", "SET-CONFIG-EPOCH", i+1).Err(); err != nil {
		return err
	}
	if i == 0 {
		return nil
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return err
	}
	to := redis.NewClient(&redis.Options{Addr: first})
	defer to.Close()
	return to.ClusterMeet(ctx, host, port).Err()
}

// whole returns when a node sees all n, and all slots.
func whole(ctx context.Context, addr string, n int) error {
	rdb := redis.NewClient(&redis.Options{Addr: addr})
	defer rdb.Close()
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		info, err := rdb.ClusterInfo(ctx).Result()
		if err != nil {
			return err
		}
		if strings.Contains(info, "cluster_state:ok") && field(info, "cluster_known_nodes") == fmt.Sprint(n) {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
}
