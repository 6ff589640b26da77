package integration

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock/integration/history"
	"github.com/seed-b640e7e9/lock/integration/worker"
	"github.com/seed-b640e7e9/lock/internal/redistest"
)

var tableFile = flag.String("table", "", "a file that the fault table is written to, in Markdown")

// row is one line of the fault table: what is broken, for how long, and whether the promise covers it.
type row struct {
	fault string
	args  []string // of the server
	make  func(n *nemesis)
	// overlap is what is not promised: two holders, for as long as the first needs to hear of it. Then fences by the
	// server's clock have to protect the resource.
	overlap bool
	setup   func(n *nemesis) // before the workers begin
	shows   []string         // what Acquire or Release has to say
	clock   bool             // the server's can be set
	pool    int              // connections of a worker
	sql     bool             // the registers are in SQLite
	network bool             // each worker has a network namespace; the registers are in SQLite too, within reach of those cut off
	second  bool             // there have to be two holders for a while: Kept are held under leases that last
}

const faultTTL = 600 * time.Millisecond

func sleep(d time.Duration) { time.Sleep(d) }

// all does something to every worker's way to Redis.
func all(f func(p *redistest.Proxy)) func(n *nemesis) {
	return func(n *nemesis) {
		for _, p := range n.workers {
			f(p.proxy)
		}
	}
}

// some makes n of the commands of each worker go wrong.
func some(m redistest.Match, a redistest.Action, times int) func(n *nemesis) {
	return func(n *nemesis) {
		var rules []*redistest.Rule
		for _, p := range n.workers {
			rules = append(rules, p.proxy.On(m, a).Times(times))
		}
		sleep(time.Second)
		for _, r := range rules {
			require.Positive(n.t, r.Hits())
		}
	}
}

// config sets a parameter of the server for a second.
func config(name, value, after string) func(n *nemesis) {
	return func(n *nemesis) {
		n.do("config", "set", name, value)
		sleep(time.Second)
		n.do("config", "set", name, after)
	}
}

var commands = redistest.Cmd("SET", "EVALSHA", "EVAL")

var rows = []row{
	{fault: "nothing", make: func(*nemesis) { sleep(time.Second) }},
	{fault: "kill -9 of Redis, appendonly (fsync always)", args: []string{"--appendonly", "yes", "--appendfsync", "always"}, make: func(n *nemesis) {
		n.server.Kill()
		n.server.Restart(n.t)
	}},
	{fault: "kill -9 of Redis without persistence", overlap: true, make: func(n *nemesis) { n.server.Restart(n.t) }},
	{fault: "SIGSTOP of Redis for less than the TTL", make: func(n *nemesis) { n.stop(faultTTL / 3) }},
	{fault: "SIGSTOP of Redis for more than the TTL", make: func(n *nemesis) { n.stop(faultTTL * 3 / 2) }},
	{fault: "SIGSTOP of a client for more than the TTL", make: func(n *nemesis) { n.freeze(n.workers[0], faultTTL*3/2) }},
	{fault: "SIGKILL of a client", make: func(n *nemesis) { n.replace(n.workers[0]); sleep(time.Second) }},
	{fault: "FLUSHALL", overlap: true, make: func(n *nemesis) { n.do("flushall"); sleep(time.Second) }},
	{fault: "SCRIPT FLUSH", make: answered("NOSCRIPT", func(n *nemesis) { n.do("script", "flush"); sleep(time.Second) })},
	{fault: "DEL of the key by a third party", overlap: true, make: func(n *nemesis) {
		for range 10 {
			for _, name := range n.names() {
				n.do("del", "lock:"+name)
			}
			sleep(faultTTL / 10)
		}
	}},
	{fault: "overwrite of the key by a third party", overlap: true, make: func(n *nemesis) {
		for _, name := range n.names() {
			n.do("set", "lock:"+name, "another", "px", 300)
		}
		sleep(time.Second)
	}},
	{fault: "wrong type at the key", shows: []string{"WRONGTYPE"}, overlap: true, make: func(n *nemesis) {
		for _, name := range n.names() {
			n.do("eval", "redis.call('del', KEYS[1]) redis.call('rpush', KEYS[1], 'x') redis.call('pexpire', KEYS[1], 300)", 1, "lock:"+name)
		}
		sleep(time.Second)
	}},
	{fault: "wrong type at the fence counter", shows: []string{"WRONGTYPE"}, overlap: true, make: func(n *nemesis) {
		for _, name := range n.names() {
			key := "fence:{lock:" + name + "}:" + name
			n.do("eval", "redis.call('del', KEYS[1]) redis.call('rpush', KEYS[1], 'x') redis.call('pexpire', KEYS[1], 500)", 1, key)
		}
		sleep(time.Second)
	}},
	{fault: "READONLY: demoted to a replica of nobody", shows: []string{"READONLY"}, make: func(n *nemesis) {
		n.do("replicaof", "127.0.0.1", "1") // where there is nothing to copy from, so that the data stays
		sleep(time.Second)
		n.do("replicaof", "no", "one")
	}},
	{fault: "NOAUTH", shows: []string{"NOAUTH"}, make: func(n *nemesis) {
		n.do("config", "set", "requirepass", "secret")
		n.do("client", "kill", "type", "normal")
		sleep(time.Second)
		n.do("config", "set", "requirepass", "")
	}},
	{fault: "NOPERM: commands", shows: []string{"acquire NOPERM", "release NOPERM"}, make: acl("-evalsha -eval", "+evalsha +eval")},
	{fault: "NOPERM: keys", shows: []string{"acquire NOPERM"}, make: acl("resetkeys", "~*")},
	{fault: "NOPERM: channels", make: acl("resetchannels", "&*")},
	{fault: "OOM, noeviction", shows: []string{"OOM"}, make: config("maxmemory", "1", "0")},
	{fault: "eviction, allkeys-lru", overlap: true, args: []string{"--maxmemory-policy", "allkeys-lru"}, make: config("maxmemory", "1", "0")},
	{fault: "NOREPLICAS", shows: []string{"NOREPLICAS"}, make: config("min-replicas-to-write", "1", "0")},
	{fault: "LOADING: a restart with a big AOF", args: []string{"--appendonly", "yes", "--appendfsync", "always", "--aof-use-rdb-preamble", "no", "--enable-debug-command", "yes"},
		setup: func(n *nemesis) { n.do("debug", "populate", "1000000"); n.do("bgrewriteaof"); n.awaitRewrite() },
		make:  func(n *nemesis) { n.server.Restart(n.t) }},
	{fault: "BUSY: a slow script", args: []string{"--busy-reply-threshold", "50"},
		make: answered("BUSY", func(n *nemesis) { ofServer["BUSY"](n, faultTTL) })},
	{fault: "CLIENT KILL", make: func(n *nemesis) {
		for range 10 {
			n.do("client", "kill", "type", "normal")
			n.do("client", "kill", "type", "pubsub")
			sleep(faultTTL / 10)
		}
	}},
	{fault: "CLIENT PAUSE", make: func(n *nemesis) { ofServer["CLIENT PAUSE"](n, faultTTL/2) }},
	{fault: "maxclients", make: func(n *nemesis) {
		n.do("config", "set", "maxclients", "1")
		all(func(p *redistest.Proxy) { p.Cut() })(n)
		sleep(time.Second)
		n.do("config", "set", "maxclients", "10000")
	}},
	{fault: "pool of one connection, for eight goroutines", pool: 1, make: func(*nemesis) { sleep(time.Second) }},
	{fault: "SIGSTOP of a client, the register in SQLite", sql: true, make: func(n *nemesis) { n.freeze(n.workers[0], faultTTL*3/2) }},
	{fault: "FLUSHALL, the register in SQLite", sql: true, overlap: true, make: func(n *nemesis) { n.do("flushall"); sleep(time.Second) }},
	{fault: "slow link: 100 ms", make: func(n *nemesis) {
		all(func(p *redistest.Proxy) { p.Latency(100 * time.Millisecond) })(n)
		sleep(time.Second)
		all(func(p *redistest.Proxy) { p.Latency(0) })(n)
	}},
	{fault: "half-open connections: cut without a word", make: func(n *nemesis) {
		all(func(p *redistest.Proxy) { p.Silence() })(n)
		sleep(faultTTL / 2)
		all(func(p *redistest.Proxy) { p.Cut(); p.Heal() })(n)
		sleep(faultTTL / 2)
	}},
	{fault: "silent network, for more than the TTL", make: func(n *nemesis) {
		all(func(p *redistest.Proxy) { p.Silence() })(n)
		sleep(faultTTL * 3 / 2)
		all(func(p *redistest.Proxy) { p.Heal() })(n)
	}},
	{fault: "partition of one process", make: func(n *nemesis) {
		n.workers[0].proxy.Silence()
		sleep(faultTTL * 3 / 2)
		n.workers[0].proxy.Heal()
	}},
	{fault: "refused connections", make: func(n *nemesis) {
		all(func(p *redistest.Proxy) { p.RefuseAll(); p.Cut() })(n)
		sleep(time.Second)
		all(func(p *redistest.Proxy) { p.Heal() })(n)
	}},
	{fault: "replies lost after the effect, connection closed", make: some(commands, redistest.DropReply(), 20)},
	{fault: "replies lost after the effect, connection silent", make: some(commands, redistest.SwallowReply(), 10)},
	{fault: "requests that arrive late", make: some(commands, redistest.DelayRequest(faultTTL/2), 10)},
	{fault: "requests that arrive after the TTL", make: some(commands, redistest.DelayRequest(faultTTL*3/2), 5)},
	{fault: "server clock a minute forward", overlap: true, make: func(n *nemesis) { n.clock(time.Minute); sleep(time.Second) }, clock: true},
	{fault: "server clock a minute back", make: func(n *nemesis) { n.clock(-time.Minute); sleep(time.Second) }, clock: true},
}

// acl changes the rights of the workers' user for a second.
func acl(take, give string) func(n *nemesis) {
	set := func(n *nemesis, rules string) {
		args := []any{"acl", "setuser", "default"}
		for _, r := range strings.Fields(rules) {
			args = append(args, r)
		}
		n.do(args...)
	}
	return func(n *nemesis) {
		set(n, take)
		sleep(time.Second)
		set(n, give)
	}
}

// answered sees that the server answers some commands with an error during the fault: the Locker deals with it, so the workers need
// not see any of it.
func answered(code string, fault func(n *nemesis)) func(n *nemesis) {
	return func(n *nemesis) {
		before := n.stat("errorstats", "errorstat_"+code+":count=")
		fault(n)
		require.Greater(n.t, n.stat("errorstats", "errorstat_"+code+":count="), before, "nobody was told %s", code)
	}
}

// stat returns a number of INFO: the one after the text, 0 if that is not there.
func (n *nemesis) stat(section, text string) int {
	info, err := n.admin.Info(context.Background(), section).Result()
	require.NoError(n.t, err)
	_, rest, _ := strings.Cut(info, text)
	number := rest[:len(rest)-len(strings.TrimLeft(rest, "0123456789"))]
	value, _ := strconv.Atoi(number)
	return value
}

func (n *nemesis) names() []string { return slices.Concat(n.config.Names, n.config.Kept) }

func (n *nemesis) awaitRewrite() {
	rdb := n.server.Client(n.t)
	for range 600 {
		info, _ := rdb.Info(context.Background(), "persistence").Result()
		if strings.Contains(info, "aof_rewrite_in_progress:0") && strings.Contains(info, "aof_rewrite_scheduled:0") {
			return
		}
		sleep(50 * time.Millisecond)
	}
	n.t.Fatal("the AOF is not rewritten")
}

// result is what a row has shown.
type result struct {
	*history.Report
	row
	during, after int // grants
	errors        string
	skipped       string // why, if it is not run
}

func TestFaults(t *testing.T) {
	var results []result
	for _, r := range slices.Concat(rows, namespaceRows) {
		t.Run(r.fault, func(t *testing.T) {
			if why := noNamespaces(); r.network && why != "" {
				results = append(results, result{row: r, skipped: why})
				t.Skip(why)
			}
			results = append(results, fault(t, r))
		})
	}
	results = append(results, clusterFaults(t)...)
	results = append(results, sentinelFaults(t)...)
	writeTable(t, results)
}

func (r *row) config() worker.Config {
	c := worker.Config{
		Names: strings.Fields("a b c d"), Kept: []string{"k1", "k2"}, TTL: faultTTL, Handoffs: 2, Goroutines: 6, Stay: 5 * time.Millisecond,
		Clock: r.overlap, Pool: r.pool, Seed: uint64(time.Now().UnixNano()),
	}
	if r.second {
		c.KeptTTL, c.Keep = lasting, lasting/3+time.Second
	}
	return c
}

// fault runs a row: holders, waiters and acquirers in three processes, some peace, the fault, and a while to recover.
func fault(t *testing.T, r row) result {
	c := r.config()
	if r.sql || r.network {
		c.Resource = filepath.Join(t.TempDir(), "registers")
		require.NoError(t, worker.CreateRegisters(c.Resource))
	}
	offset := clockShim(t, r.clock)
	if r.network {
		return inNamespaces(t, c, r)
	}
	n := newNemesis(newWorld(t, c, r.args...))
	n.offset = offset
	return n.suffer(r)
}

// suffer is fault on a world that is there.
func (n *nemesis) suffer(r row) result {
	t, w := n.t, n.world
	t.Helper()
	if r.setup != nil {
		r.setup(n)
	}
	for range 3 {
		w.spawn()
	}
	sleep(700 * time.Millisecond)
	from := history.Now()
	r.make(n)
	to := history.Now()
	sleep(faultTTL + 500*time.Millisecond)
	over := history.Now()
	sleep(500 * time.Millisecond)
	events := w.finish()
	conditions := w.conditions()
	if r.overlap {
		conditions.Overlap = []history.Window{{From: from, To: to + n.config.Longest()}}
	}
	if r.fault == "nothing" {
		conditions.Calm = []history.Window{{From: from - 700*time.Millisecond, To: to + time.Second}}
	}
	res := result{Report: history.Check(events, conditions), row: r, errors: failures(events)}
	for _, e := range events {
		if e.Kind == history.Acquired {
			switch {
			case from <= e.At && e.At < to:
				res.during++
			case over <= e.At:
				res.after++
			}
		}
	}
	t.Logf("%v; %d grants during the fault, %d after it; overlap at most %v; %s", res.Report, res.during, res.after, res.MaxOverlap, res.errors)
	require.Empty(t, res.Violations)
	require.Positive(t, res.after, "it goes on")
	require.Greater(t, writes(events, over), res.after/2, "and its fences are not refused")
	for _, shown := range r.shows {
		require.Contains(t, res.errors, shown, "the fault was not felt")
	}
	if r.overlap {
		require.Less(t, res.MaxOverlap, n.config.Longest(), "a loss is noticed by the next renewal, and at the deadline at the latest")
	}
	if r.second {
		require.Greater(t, res.MaxOverlap, faultTTL/2, "nobody got in besides a holder whose lease lasts: the fault was not felt")
	}
	w.requireNoKeys()
	return res
}

// writes counts those that a register has accepted since then.
func writes(events []history.Event, since time.Duration) (n int) {
	for _, e := range events {
		if e.Kind == history.Write && e.Outcome == history.Accepted && e.Called >= since {
			n++
		}
	}
	return n
}

// failures counts what Acquire and Release said when they failed, by kind.
func failures(events []history.Event) string {
	counts := map[string]int{}
	for _, e := range events {
		if e.Outcome == "" || e.Kind != history.Failed && e.Kind != history.Released {
			continue
		}
		what := "acquire"
		if e.Kind == history.Released {
			what = "release"
		}
		if kind := kindOf(e.Outcome); kind != "deadline exceeded" && kind != "context canceled" { // the worker's own
			counts[what+" "+kind]++
		}
	}
	var parts []string
	for what, times := range counts {
		parts = append(parts, fmt.Sprintf("%s %d", what, times))
	}
	slices.Sort(parts)
	return strings.Join(parts, ", ")
}

// kindOf names an error by what it says first.
func kindOf(text string) string {
	for _, kind := range []string{"lock lost", "no route to host", "network is unreachable", "outcome unknown", "held by another", "NOAUTH", "NOPERM",
		"OOM", "NOREPLICAS", "READONLY", "LOADING", "BUSY", "WRONGTYPE", "max number of clients", "refused", "deadline exceeded", "EOF", "reset",
		"broken pipe", "i/o timeout", "TRYAGAIN", "CLUSTERDOWN", "context canceled", "connection pool timeout", "no answer"} {
		if strings.Contains(text, kind) {
			return kind
		}
	}
	return text
}

func writeTable(t *testing.T, results []result) {
	t.Helper()
	if *tableFile == "" {
		return
	}
	var b strings.Builder
	b.WriteString("| fault | promised | grants during, after | lost | alarm after the deadline | two holders | errors |\n|---|---|---|---|---|---|---|\n")
	for _, r := range results {
		if r.skipped != "" {
			fmt.Fprintf(&b, "| %s | not run: %s | | | | | |\n", r.fault, r.skipped)
			continue
		}
		promised, overlap := "one holder", "never"
		if r.overlap {
			promised, overlap = "loss is heard; clock fence", r.MaxOverlap.Round(time.Millisecond).String()
		}
		fmt.Fprintf(&b, "| %s | %s | %d, %d | %d | %v | %s | %s |\n", r.fault, promised, r.during, r.after, r.Losses,
			max(r.MaxLate, 0).Round(100*time.Microsecond), overlap, r.errors)
	}
	require.NoError(t, os.WriteFile(*tableFile, []byte(b.String()), 0o644))
}
