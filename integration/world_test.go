// Package integration breaks things on purpose, with real servers and processes, and proves from what was recorded that
// the promise was kept.
package integration

import (
	"context"
	"flag"
	"io"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock/integration/history"
	"github.com/seed-b640e7e9/lock/integration/worker"
	"github.com/seed-b640e7e9/lock/internal/redistest"
)

func TestMain(m *testing.M) {
	if worker.Main() {
		return
	}
	redis.SetLogger(&logging.VoidLogger{})
	flag.Parse()
	os.Exit(redistest.Main(m))
}

// world is a Redis with the locks, another with the registers, and workers, each with a network of its own.
type world struct {
	t        *testing.T
	server   *redistest.Server
	resource *redistest.Server
	network  *network // nil if workers have no namespaces
	config   worker.Config
	ttls     []time.Duration                             // of workers, in turn
	keys     func(ctx context.Context) ([]string, error) // of locks that are left

	mu      sync.Mutex // guards all below
	events  []history.Event
	frozen  map[int][]history.Window
	workers []*process
	last    int // ID given
}

// process is a running worker.
type process struct {
	id     int
	proxy  *redistest.Proxy
	cmd    *exec.Cmd
	stdin  io.Closer
	gone   chan struct{} // closed when it has ended and all it said is collected
	killed atomic.Bool   // on purpose
	err    error         // how it has ended, once it is gone
}

func newWorld(t *testing.T, c worker.Config, args ...string) *world {
	t.Helper()
	server := redistest.Start(t, redistest.Redis7, args...)
	w := worldOf(t, c, server.Client(t))
	w.server = server
	return w
}

// worldOf is a world around a Redis that the workers find by themselves.
func worldOf(t *testing.T, c worker.Config, rdb redis.UniversalClient) *world {
	return &world{
		t: t, config: c, ttls: []time.Duration{c.TTL}, frozen: map[int][]history.Window{}, resource: redistest.Start(t, redistest.Redis7),
		keys: func(ctx context.Context) ([]string, error) { return keysOf(ctx, rdb) },
	}
}

// keysOf returns the locks that are left.
func keysOf(ctx context.Context, rdb redis.UniversalClient) (all []string, err error) {
	cluster, ok := rdb.(*redis.ClusterClient)
	if !ok {
		return rdb.Keys(ctx, "lock:*").Result()
	}
	var mu sync.Mutex // guards all
	err = cluster.ForEachMaster(ctx, func(ctx context.Context, node *redis.Client) error {
		keys, err := node.Keys(ctx, "lock:*").Result()
		mu.Lock()
		defer mu.Unlock()
		all = append(all, keys...)
		return err
	})
	return all, err
}

// spawn starts a worker.
func (w *world) spawn() *process {
	w.t.Helper()
	w.mu.Lock()
	w.last++
	c := w.config
	c.ID, c.Seed = w.last, c.Seed+uint64(w.last)
	w.mu.Unlock()
	p := &process{id: c.ID, gone: make(chan struct{})}
	if c.Addr == "" {
		p.proxy = redistest.ProxyTo(w.t, w.server.Addr())
		c.Addr = p.proxy.Listen(w.t)
	}
	if c.Resource == "" {
		c.Resource = w.resource.Addr()
	}
	c.Plain = c.ID%3 == 0
	c.TTL = w.ttls[c.ID%len(w.ttls)]
	exe, err := os.Executable()
	require.NoError(w.t, err)
	p.cmd = exec.Command(exe)
	if w.network != nil {
		p.cmd = w.network.join(c.ID, exe)
	}
	p.cmd.Env = append(os.Environ(), c.Env())
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p.cmd.Stderr = os.Stderr
	stdin, err := p.cmd.StdinPipe()
	require.NoError(w.t, err)
	p.stdin = stdin
	out, err := p.cmd.StdoutPipe()
	require.NoError(w.t, err)
	require.NoError(w.t, p.cmd.Start())
	go func() {
		defer close(p.gone)
		history.Collect(out, func(e history.Event) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.events = append(w.events, e)
		})
		p.err = p.cmd.Wait()
	}()
	w.t.Cleanup(func() { w.kill(p) })
	w.mu.Lock()
	defer w.mu.Unlock()
	w.workers = append(w.workers, p)
	return p
}

// freeze stops a worker for a while.
func (w *world) freeze(p *process, d time.Duration) {
	from := history.Now()
	_ = p.cmd.Process.Signal(syscall.SIGSTOP)
	time.Sleep(d)
	_ = p.cmd.Process.Signal(syscall.SIGCONT)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.frozen[p.id] = append(w.frozen[p.id], history.Window{From: from, To: history.Now() + 50*time.Millisecond})
}

// kill ends a worker at once.
func (w *world) kill(p *process) {
	p.killed.Store(true)
	_ = p.cmd.Process.Kill()
	<-p.gone
	if p.proxy != nil {
		time.AfterFunc(time.Second, p.proxy.Close) // until then what is late arrives
	}
}

// finish lets all workers end by themselves, and returns what they have said.
func (w *world) finish() []history.Event {
	w.t.Helper()
	for _, p := range w.workers {
		_ = p.stdin.Close()
	}
	for _, p := range w.workers {
		select {
		case <-p.gone:
		case <-time.After(time.Minute):
			_ = p.cmd.Process.Signal(syscall.SIGQUIT)
			w.t.Errorf("worker %d does not end", p.id)
			sleep(5 * time.Second)
			w.kill(p)
		}
		if p.err != nil && !p.killed.Load() {
			w.t.Errorf("worker %d: %v", p.id, p.err)
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.events
}

func (w *world) conditions() history.Conditions {
	return history.Conditions{Frozen: w.frozen, Late: 250 * time.Millisecond, Drift: worker.Drift}
}

// requireNoKeys waits until no lock is left: keys of processes that were killed end with their TTL.
func (w *world) requireNoKeys() {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*w.config.Longest()+10*time.Second)
	defer cancel()
	for {
		left, err := w.keys(ctx)
		if err == nil && len(left) == 0 {
			return
		}
		if ctx.Err() != nil {
			w.t.Fatalf("left: %v, %v", left, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func TestCalm(t *testing.T) {
	w := newWorld(t, worker.Config{Names: []string{"a", "b"}, Kept: []string{"k1", "k2"}, TTL: 500 * time.Millisecond, Handoffs: -1, Goroutines: 4, Stay: time.Millisecond})
	for range 3 {
		w.spawn()
	}
	from := history.Now()
	time.Sleep(5 * time.Second)
	to := history.Now()
	r := history.Check(w.finish(), history.Conditions{Late: 250 * time.Millisecond, Drift: worker.Drift, Calm: []history.Window{{From: from, To: to}}})
	t.Log(r)
	require.Empty(t, r.Violations)
	require.Zero(t, r.Unknown)
	require.Greater(t, r.Grants, 200)
	w.requireNoKeys()
}
