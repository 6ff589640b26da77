package integration

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock/integration/worker"
	"github.com/seed-b640e7e9/lock/internal/redistest"
)

// network is a bridge with a link to each worker, which runs in a network namespace of its own. Redis is at the bridge. What is sent
// while a link is down is lost, whereas the kernel acknowledges what goes to a proxy that is silent: so there are TCP's
// retransmissions, connections that can't be made, and hosts and networks that can't be reached.
type network struct {
	t      *testing.T
	name   string // what the names of all its parts begin with
	subnet string // what addresses begin with
}

const (
	inside = "eth0"              // a worker's end of its link
	nobody = "02:00:00:00:00:fe" // a hardware address
)

// noNamespaces tells why there can be no network of this kind here; "" if there can.
var noNamespaces = sync.OnceValue(func() string {
	if _, err := exec.LookPath("ip"); err != nil {
		return "no network namespaces: there is no ip, apt-get install iproute2"
	}
	name := fmt.Sprintf("lock%d-p", os.Getpid())
	defer func() {
		_, _ = ip("link", "del", name)
		_, _ = ip("netns", "del", name)
	}()
	for _, args := range [][]string{
		{"netns", "add", name},
		{"link", "add", name, "type", "bridge"},
		{"link", "add", name + "v", "type", "veth", "peer", "name", inside, "netns", name},
		{"link", "del", name + "v"},
		{"netns", "exec", name, "true"},
	} {
		if out, err := ip(args...); err != nil {
			return fmt.Sprintf("no network namespaces: ip %s: %s", strings.Join(args[:2], " "), strings.TrimSpace(out))
		}
	}
	return ""
})

func ip(args ...string) (string, error) {
	out, err := exec.Command("ip", args...).CombinedOutput()
	return string(out), err
}

// newNetwork makes a network without workers. Its names and addresses come from the number of this process, so that tests that run
// at the same time keep out of each other's way; the addresses are those set apart for trials of networks.
func newNetwork(t *testing.T) *network {
	t.Helper()
	pid := os.Getpid()
	w := &network{t: t, name: fmt.Sprintf("lock%d-", pid), subnet: fmt.Sprintf("198.%d.%d.", 18+pid/256%2, pid%256)}
	w.ip("link", "add", w.bridge(), "type", "bridge")
	t.Cleanup(func() { w.ip("link", "del", w.bridge()) })
	w.ip("addr", "add", w.address(0)+"/24", "dev", w.bridge())
	w.ip("link", "set", w.bridge(), "up")
	return w
}

func (w *network) bridge() string { return w.name + "b" }

// end is both the name of a worker's namespace and that of the other end of its link, which is at the bridge.
func (w *network) end(id int) string { return w.name + strconv.Itoa(id) }

// address is a worker's; 0 is for the bridge.
func (w *network) address(id int) string { return w.subnet + strconv.Itoa(id+1) }

func (w *network) ip(args ...string) {
	w.t.Helper()
	if out, err := ip(args...); err != nil {
		w.t.Errorf("ip %v: %v: %s", args, err, out)
	}
}

// in is ip in the namespace of a worker.
func (w *network) in(id int, args ...string) {
	w.t.Helper()
	w.ip(append([]string{"-n", w.end(id)}, args...)...)
}

// args make a server listen at the bridge too.
func (w *network) args() []string {
	return []string{"--bind", "127.0.0.1 " + w.address(0), "--protected-mode", "no"}
}

// addr is where workers find a server that was started with args.
func (w *network) addr(s *redistest.Server) string {
	_, port, err := net.SplitHostPort(s.Addr())
	require.NoError(w.t, err)
	return net.JoinHostPort(w.address(0), port)
}

// inNamespaces runs a row whose workers are on such a network.
func inNamespaces(t *testing.T, c worker.Config, r row) result {
	t.Helper()
	bridged := newNetwork(t)
	w := newWorld(t, c, append(bridged.args(), r.args...)...)
	w.network, w.config.Addr = bridged, bridged.addr(w.server)
	return newNemesis(w).suffer(r)
}

// join makes a namespace for a worker, and returns the command to be run in it. It takes the place of ip in the process, so signals reach it.
func (w *network) join(id int, exe string) *exec.Cmd {
	w.t.Helper()
	w.ip("netns", "add", w.end(id))
	w.ip("link", "add", w.end(id), "type", "veth", "peer", "name", inside, "netns", w.end(id))
	w.t.Cleanup(func() { // the namespace alone would take its link along only later
		w.ip("link", "del", w.end(id))
		w.ip("netns", "del", w.end(id))
	})
	w.ip("link", "set", w.end(id), "master", w.bridge(), "up")
	w.in(id, "addr", "add", w.address(id)+"/24", "dev", inside)
	w.in(id, "link", "set", inside, "up")
	w.in(id, "link", "set", "lo", "up") // the kernel's word that a host can't be reached comes that way
	// Whoever does not answer to three questions, 50 ms apart, is not there: with the usual second the faults are over before.
	w.in(id, "ntable", "change", "name", "arp_cache", "dev", inside, "retrans", "50")
	return exec.Command("ip", "netns", "exec", w.end(id), exe)
}

// damage is something that happens to the link of a worker, until it is undone.
type damage struct {
	begin, end func(w *network, id int)
	hears      bool     // what Redis sends arrives
	arrives    bool     // what the worker sends does
	counts     []string // what the worker's kernel counts of it
}

// Counters of a network namespace, as in /proc/net/snmp.
const (
	received        = "Tcp InSegs"
	sentAgain       = "Tcp RetransSegs"
	hostUnreachable = "Icmp InDestUnreachs"
	noRoute         = "Ip OutNoRoutes"
)

const (
	longer     = faultTTL * 3 / 2 // than the TTL
	muchLonger = faultTTL * 4     // so that requests on the old connections are given up, and new ones are tried
)

var (
	linkDown = damage{
		begin:  func(w *network, id int) { w.ip("link", "set", w.end(id), "down") },
		end:    func(w *network, id int) { w.ip("link", "set", w.end(id), "up") },
		counts: []string{sentAgain, hostUnreachable},
	}
	interfaceDown = damage{
		begin:  func(w *network, id int) { w.in(id, "link", "set", inside, "down") },
		end:    func(w *network, id int) { w.in(id, "link", "set", inside, "up") },
		counts: []string{noRoute},
	}
	// A wrong hardware address is what makes packets of one direction alone get lost.
	repliesLost = damage{
		begin:   func(w *network, id int) { w.ip("neigh", "replace", w.address(id), "lladdr", nobody, "dev", w.bridge()) },
		end:     func(w *network, id int) { w.ip("neigh", "del", w.address(id), "dev", w.bridge()) },
		arrives: true,
		counts:  []string{sentAgain},
	}
	requestsLost = damage{
		begin:  func(w *network, id int) { w.in(id, "neigh", "replace", w.address(0), "lladdr", nobody, "dev", inside) },
		end:    func(w *network, id int) { w.in(id, "neigh", "del", w.address(0), "dev", inside) },
		hears:  true,
		counts: []string{sentAgain},
	}
)

// partition does damage to the links of the first workers for a while, and sees that it is felt.
func partition(d damage, workers int, lasts time.Duration) func(n *nemesis) {
	return func(n *nemesis) {
		hit := n.workers[:workers]
		for _, p := range hit {
			d.begin(n.network, p.id)
		}
		calls := n.calls()
		var before []map[string]int
		for _, p := range hit {
			before = append(before, p.counters(n.t))
		}
		sleep(lasts)
		for i, p := range hit {
			after := p.counters(n.t)
			for _, what := range d.counts {
				require.Greater(n.t, after[what], before[i][what], what)
			}
			require.Equal(n.t, d.hears, after[received] > before[i][received], "whether anything comes from Redis")
		}
		if workers == len(n.workers) {
			require.Equal(n.t, d.arrives, n.calls() > calls, "whether anything comes to Redis")
		}
		for _, p := range hit {
			d.end(n.network, p.id)
		}
	}
}

// counters returns those of a worker's namespace.
func (p *process) counters(t *testing.T) map[string]int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/snmp", p.cmd.Process.Pid))
	require.NoError(t, err)
	counts, names := map[string]int{}, []string{}
	for line := range strings.Lines(string(text)) { // of names and of values, in turn
		fields := strings.Fields(line)
		if len(names) == 0 {
			names = fields
			continue
		}
		for i, name := range names {
			counts[strings.Replace(fields[0], ":", " ", 1)+name], _ = strconv.Atoi(fields[i])
		}
		names = nil
	}
	return counts
}

// calls returns how many scripts the server has run.
func (n *nemesis) calls() int { return n.stat("commandstats", "cmdstat_evalsha:calls=") }

var namespaceRows = []row{
	{fault: "namespaces: the link of one process is down, for more than the TTL", network: true, make: partition(linkDown, 1, longer)},
	{fault: "namespaces: all links are down, for four TTLs", network: true, make: partition(linkDown, 3, muchLonger)},
	{fault: "namespaces: no process has a network, for four TTLs", network: true, make: partition(interfaceDown, 3, muchLonger)},
	{fault: "namespaces: requests arrive, and the replies to all processes are lost", network: true, make: partition(repliesLost, 3, longer)},
	{fault: "namespaces: the requests of one process are lost, and it hears others' releases", network: true, make: partition(requestsLost, 1, longer)},
}

// TestAWorkerInANamespaceIsTheProcessThatWasStarted: else a signal would reach another one.
func TestAWorkerInANamespaceIsTheProcessThatWasStarted(t *testing.T) {
	if why := noNamespaces(); why != "" {
		t.Skip(why)
	}
	w := newNetwork(t)
	cmd := w.join(1, "/bin/sleep")
	cmd.Args = append(cmd.Args, "60")
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	require.Eventually(t, func() bool {
		name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", cmd.Process.Pid))
		return err == nil && strings.TrimSpace(string(name)) == "sleep"
	}, 5*time.Second, 10*time.Millisecond)
}
