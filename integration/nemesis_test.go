package integration

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock/integration/history"
	"github.com/seed-b640e7e9/lock/integration/worker"
	"github.com/seed-b640e7e9/lock/internal/redistest"
)

var (
	nemesisTime = flag.Duration("nemesis", 60*time.Second, "how long faults are made at random")
	nemesisSeed = flag.Uint64("seed", 0, "of the faults; 0: one by the clock")
)

const workers = 5

// nemesis makes faults on the safe rows: those after which one holder at a time is promised.
type nemesis struct {
	*world
	admin  *redis.Client // with a connection of its own, from before anything is broken
	offset string        // the file that moves the server's clock, if there is one

	mu     sync.Mutex // guards counts
	counts map[string]int
}

func (n *nemesis) count(kind string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.counts[kind]++
}

// ofClients are faults of one process, or of its way to Redis. They end within about d.
var ofClients = map[string]func(n *nemesis, p *process, d time.Duration){
	"client stopped":  func(n *nemesis, p *process, d time.Duration) { n.freeze(p, d) },
	"client killed":   func(n *nemesis, p *process, _ time.Duration) { n.replace(p) },
	"connections cut": func(_ *nemesis, p *process, _ time.Duration) { p.proxy.Cut() },
	"refused": func(_ *nemesis, p *process, d time.Duration) {
		p.proxy.RefuseAll()
		p.proxy.Cut()
		time.Sleep(d)
		p.proxy.Heal()
	},
	"silent network": func(_ *nemesis, p *process, d time.Duration) {
		p.proxy.Silence()
		time.Sleep(d)
		p.proxy.Heal()
	},
	"slow network": func(_ *nemesis, p *process, d time.Duration) {
		p.proxy.Latency(d / 4)
		time.Sleep(d)
		p.proxy.Latency(0)
	},
	"replies lost":    rule(redistest.Cmd("SET", "EVALSHA", "EVAL"), redistest.DropReply(), 3),
	"replies gone":    rule(redistest.Cmd("SET", "EVALSHA", "EVAL"), redistest.SwallowReply(), 2),
	"requests late":   rule(redistest.Cmd("SET", "EVALSHA", "EVAL"), redistest.DelayRequest(300*time.Millisecond), 3),
	"replies late":    rule(redistest.Cmd("SET", "EVALSHA", "EVAL"), redistest.DelayReply(300*time.Millisecond), 3),
	"refused by text": rule(redistest.Cmd("EVALSHA"), redistest.ReplyError("LOADING Redis is loading the dataset in memory"), 3),
}

// rule makes the next few commands go wrong in one way.
func rule(m redistest.Match, a redistest.Action, times int) func(*nemesis, *process, time.Duration) {
	return func(_ *nemesis, p *process, d time.Duration) {
		r := p.proxy.On(m, a).Times(times)
		time.Sleep(d)
		r.Off()
	}
}

// ofServer are faults of the server.
var ofServer = map[string]func(n *nemesis, d time.Duration){
	"server stopped, for less than a TTL": func(n *nemesis, d time.Duration) { n.stop(d / 4) },
	"server stopped, for more":            func(n *nemesis, d time.Duration) { n.stop(300*time.Millisecond + d) },
	"server killed, appendonly": func(n *nemesis, d time.Duration) {
		n.server.Kill()
		time.Sleep(d / 4)
		n.server.Restart(n.t)
	},
	"CLIENT KILL":  func(n *nemesis, _ time.Duration) { n.do("client", "kill", "type", "normal") },
	"KILL pubsub":  func(n *nemesis, _ time.Duration) { n.do("client", "kill", "type", "pubsub") },
	"CLIENT PAUSE": func(n *nemesis, d time.Duration) { n.do("client", "pause", d.Milliseconds(), "all"); time.Sleep(d) },
	"SCRIPT FLUSH": func(n *nemesis, _ time.Duration) { n.do("script", "flush") },
	"BUSY": func(n *nemesis, d time.Duration) {
		n.do("eval", fmt.Sprintf("local t = redis.call('TIME'); local till = t[1]*1000000+t[2]+%d; repeat t = redis.call('TIME') until t[1]*1000000+t[2] > till", (d/2).Microseconds()), 0)
	},
	"OOM": func(n *nemesis, d time.Duration) {
		n.do("config", "set", "maxmemory", "1")
		time.Sleep(d / 2)
		n.do("config", "set", "maxmemory", "0")
	},
	"NOREPLICAS": func(n *nemesis, d time.Duration) {
		n.do("config", "set", "min-replicas-to-write", "1")
		time.Sleep(d / 2)
		n.do("config", "set", "min-replicas-to-write", "0")
	},
}

func (n *nemesis) stop(d time.Duration) {
	n.server.Pause()
	time.Sleep(d)
	n.server.Resume()
}

func newNemesis(w *world) *nemesis {
	n := &nemesis{world: w, counts: map[string]int{}}
	n.admin = w.server.Client(w.t, func(o *redis.Options) { o.PoolSize, o.MaxRetries = 1, -1 })
	n.do("ping")
	return n
}

// do asks the server something.
func (n *nemesis) do(args ...any) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	err := n.admin.Do(ctx, args...).Err()
	if errors.Is(err, io.EOF) || errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) { // it was killed meanwhile
		err = n.admin.Do(ctx, args...).Err()
	}
	if err != nil && !errors.Is(err, redis.Nil) {
		n.t.Errorf("%v: %v", args, err)
	}
}

// replace kills a worker and starts another.
func (n *nemesis) replace(p *process) {
	n.kill(p)
	n.spawn()
}

// alive returns a worker at random.
func (n *nemesis) alive(rnd *rand.Rand) *process {
	n.world.mu.Lock()
	defer n.world.mu.Unlock()
	var alive []*process
	for _, p := range n.workers {
		select {
		case <-p.gone:
		default:
			alive = append(alive, p)
		}
	}
	return alive[rnd.IntN(len(alive))]
}

// rage makes faults until ctx ends: each kind once, in random order, again and again.
func rage[F any](n *nemesis, ctx context.Context, rnd *rand.Rand, faults map[string]F, make func(f F, d time.Duration)) {
	for ctx.Err() == nil && !n.t.Failed() { // if it has failed, more is of no use
		kinds := slices.Sorted(maps.Keys(faults))
		rnd.Shuffle(len(kinds), func(i, j int) { kinds[i], kinds[j] = kinds[j], kinds[i] })
		for _, kind := range kinds {
			if ctx.Err() != nil || n.t.Failed() {
				return
			}
			make(faults[kind], time.Duration(20+rnd.IntN(300))*time.Millisecond)
			n.count(kind)
			time.Sleep(time.Duration(rnd.IntN(180)) * time.Millisecond)
		}
	}
}

// tell shows how far it is, each minute (with -v).
func (w *world) tell(ctx context.Context) {
	begin := time.Now()
	for minute := time.NewTicker(time.Minute); ; {
		select {
		case <-minute.C:
			w.mu.Lock()
			grants := 0
			for _, e := range w.events {
				if e.Kind == history.Acquired {
					grants++
				}
			}
			w.t.Logf("%v: %d grants, %d workers", time.Since(begin).Round(time.Second), grants, w.last)
			w.mu.Unlock()
		case <-ctx.Done():
			minute.Stop()
			return
		}
	}
}

func TestNemesis(t *testing.T) {
	seed := *nemesisSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-seed %d", seed)
	names := strings.Fields("a b c d e f g h i j k l m n o p q r s t u v w x")
	w := newWorld(t, worker.Config{Names: names, Kept: []string{"k1", "k2", "k3", "k4"}, TTL: 2 * time.Second, Handoffs: 0, Goroutines: 16, Stay: time.Millisecond, Seed: seed},
		"--appendonly", "yes", "--appendfsync", "always", "--auto-aof-rewrite-min-size", "8mb", "--maxmemory-policy", "noeviction", "--busy-reply-threshold", "50")
	w.ttls = []time.Duration{200 * time.Millisecond, 500 * time.Millisecond, time.Second, 2 * time.Second}
	n := newNemesis(w)
	for range workers {
		w.spawn()
	}
	ctx, cancel := context.WithTimeout(context.Background(), *nemesisTime)
	defer cancel()
	var wg sync.WaitGroup
	for i := range uint64(2) {
		rnd := rand.New(rand.NewPCG(seed, i+1))
		wg.Go(func() {
			rage(n, ctx, rnd, ofClients, func(f func(*nemesis, *process, time.Duration), d time.Duration) { f(n, n.alive(rnd), 2*d) })
		})
	}
	wg.Go(func() {
		rage(n, ctx, rand.New(rand.NewPCG(seed, 0)), ofServer, func(f func(*nemesis, time.Duration), d time.Duration) { f(n, d) })
	})
	wg.Go(func() { w.tell(ctx) })
	wg.Wait()
	for _, p := range w.workers {
		p.proxy.Latency(0)
		p.proxy.Heal()
	}
	events := w.finish()
	r := history.Check(events, w.conditions())
	var kinds []string
	for kind, times := range n.counts {
		kinds = append(kinds, fmt.Sprintf("%s %d", kind, times))
	}
	slices.Sort(kinds)
	t.Logf("%v: %v\n%s", *nemesisTime, r, strings.Join(kinds, ", "))
	for i, v := range r.Violations {
		if i < 10 {
			t.Log(v)
		}
	}
	require.Empty(t, r.Violations)
	if *nemesisTime >= time.Minute {
		assert.GreaterOrEqual(t, r.Changes, 10_000)
		for kind, times := range n.counts {
			assert.GreaterOrEqual(t, times, 20, kind)
		}
	}
	w.requireNoKeys()
}
