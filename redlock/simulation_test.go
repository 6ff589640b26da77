package redlock_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/internal/redistest"
	"github.com/seed-b640e7e9/lock/redlock"
)

var (
	seeds    = flag.Uint64("seeds", 500, "how many runs the simulation makes")
	fromSeed = flag.Uint64("seed", 1, "the first of them")
)

// breach is a promise that a simulation leaves out, to see that this is noticed.
type breach int

const (
	none    breach = iota
	drift          // clocks differ by what the drift allows for, and nothing is allowed for it
	amnesia        // nodes come back at once, without their data
)

// simulation is a quorum of nodes in memory, processes that want one lock, and faults, in virtual time. Its seed decides
// about nodes, work, messages and faults; the order of what happens at the same instant, and the jitter of the library,
// differ from run to run.
type simulation struct {
	seed        uint64
	rnd         *rand.Rand
	ttl         time.Duration
	fence       lock.Option
	clockFences bool
	size        int
	nodes       []*memory
	links       []*link
	calm        bool

	mu         sync.Mutex // guards all below
	held       []*lock.Lock
	last       lock.Fence
	grants     int
	lost       int
	violations []string
}

func newSimulation(seed uint64, mayBeCalm bool) *simulation {
	s := &simulation{seed: seed, rnd: rand.New(rand.NewPCG(seed, 0)), calm: mayBeCalm && seed%4 == 0}
	s.ttl = time.Duration(200+s.rnd.IntN(2000)) * time.Millisecond
	s.size = 3 + 2*s.rnd.IntN(2)
	s.fence = lock.WithFencing()
	if s.clockFences = s.rnd.IntN(2) == 0; s.clockFences {
		s.fence = lock.WithClockFencing()
	}
	return s
}

// process returns a Locker over stores.
func (s *simulation) process(stores []lock.Store) *lock.Locker {
	return redlock.Over(stores, s.fence, lock.WithTTL(s.ttl), lock.WithLogger(slog.New(slog.DiscardHandler)))
}

// connect returns links of a new process to all nodes.
func (s *simulation) connect() []lock.Store {
	stores := make([]lock.Store, len(s.nodes))
	for i, n := range s.nodes {
		l := &link{memory: n, rnd: rand.New(rand.NewPCG(s.seed, uint64(len(s.links)+1)))}
		l.set(time.Millisecond, 0)
		s.links = append(s.links, l)
		stores[i] = l
	}
	return stores
}

func (s *simulation) violated(format string, args ...any) {
	s.violations = append(s.violations, fmt.Sprintf(format, args...))
}

// granted checks the promise at the instant of a grant: nobody else is valid, and the fence is the highest so far.
func (s *simulation) granted(lk *lock.Lock) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !lk.Valid() {
		return
	}
	s.grants++
	for _, other := range s.held {
		if other.Valid() {
			s.violated("two valid holders: one until %v from now, another until %v", time.Until(other.Deadline()), time.Until(lk.Deadline()))
		}
	}
	if f := lk.Fence(); f != 0 {
		if f <= s.last {
			s.violated("fence %d after %d", f, s.last)
		}
		s.last = max(s.last, f)
	}
	s.held = append(s.held, lk)
}

func (s *simulation) over(lk *lock.Lock) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, h := range s.held {
		if h == lk {
			s.held = append(s.held[:i], s.held[i+1:]...)
			break
		}
	}
	if errors.Is(context.Cause(lk.Context()), lock.ErrLost) {
		s.lost++
	}
}

// work takes the lock a few times.
func (s *simulation) work(l *lock.Locker, rnd *rand.Rand) {
	for range 1 + rnd.IntN(4) {
		time.Sleep(time.Duration(rnd.Int64N(int64(s.ttl))))
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(rnd.Int64N(int64(10*s.ttl))))
		lk, err := l.Acquire(ctx, "n")
		cancel()
		if err != nil {
			continue
		}
		s.granted(lk)
		stay := time.NewTimer(time.Duration(rnd.Int64N(int64(s.ttl * 3 / 2))))
		select {
		case <-stay.C:
		case <-lk.Context().Done():
		}
		stay.Stop()
		s.over(lk)
		_ = lk.Release(context.Background())
	}
}

// trouble makes faults until ctx ends: of nodes and of links.
func (s *simulation) trouble(ctx context.Context, b breach) {
	some := func() time.Duration { return time.Duration(s.rnd.Int64N(int64(s.ttl))) }
	for ctx.Err() == nil {
		time.Sleep(some() / 4)
		n, l := s.nodes[s.rnd.IntN(len(s.nodes))], s.links[s.rnd.IntN(len(s.links))]
		switch s.rnd.IntN(6) {
		case 0: // slow, and some messages get lost
			l.set(some()/2, s.rnd.Float64()/2)
			time.AfterFunc(some(), func() { l.set(time.Millisecond, 0) })
		case 1: // cut
			l.set(time.Millisecond, 1)
			time.AfterFunc(2*some(), func() { l.set(time.Millisecond, 0) })
		case 2: // a whole process is
			first := s.rnd.IntN(len(s.links)/len(s.nodes)) * len(s.nodes)
			away := 2 * some()
			for _, l := range s.links[first : first+len(s.nodes)] {
				l.set(time.Millisecond, 1)
				time.AfterFunc(away, func() { l.set(time.Millisecond, 0) })
			}
		case 3:
			n.stop()
			time.AfterFunc(2*some(), n.goOn)
		case 4:
			s.restart(n, some(), b == amnesia)
		case 5: // without its data it stays away until the longest lease is over, by any clock
			if wipe := b == amnesia || s.clockFences; wipe {
				s.restart(n, some()+s.ttl*11/10, true)
			}
		}
	}
}

func (s *simulation) restart(n *memory, away time.Duration, wipe bool) {
	if n.refuses() {
		return
	}
	n.crash()
	if wipe {
		n.wipe()
	}
	time.AfterFunc(away, n.start)
}

// run runs the simulation. connect gives a process its Stores, trouble makes faults until ctx ends, and holder tells who
// has the lock at a node.
func (s *simulation) run(connect func() []lock.Store, trouble func(ctx context.Context), holder func(node int) (string, bool)) {
	var processes []*lock.Locker
	var workers sync.WaitGroup
	for range 2 + s.rnd.IntN(3) {
		l := s.process(connect())
		processes = append(processes, l)
		for range 1 + s.rnd.IntN(2) {
			rnd := rand.New(rand.NewPCG(s.rnd.Uint64(), 0))
			workers.Go(func() { s.work(l, rnd) })
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	var chaos sync.WaitGroup
	if !s.calm {
		chaos.Go(func() { trouble(ctx) })
	}
	workers.Wait()
	cancel()
	chaos.Wait()
	time.Sleep(15 * s.ttl) // until the faults are over
	for _, l := range processes {
		ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
		if err := l.Wait(ctx); err != nil {
			s.violated("something is left: %v", err)
		}
		cancel()
	}
	time.Sleep(2 * s.ttl)
	for i := range s.size {
		if held, ok := holder(i); ok {
			s.violated("node %d still has %q", i, held)
		}
	}
	ctx, cancel = context.WithTimeout(context.Background(), 10*s.ttl)
	defer cancel()
	if lk, err := processes[0].Acquire(ctx, "n"); err != nil {
		s.violated("when all is well again: %v", err)
	} else {
		s.granted(lk)
		_ = lk.Release(context.Background())
	}
	if s.calm && s.lost > 0 {
		s.violated("%d lost without a fault", s.lost)
	}
	ctx, cancel = context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	if err := processes[0].Wait(ctx); err != nil {
		s.violated("something is left at the end: %v", err)
	}
}

// inMemory runs a simulation over nodes in memory.
func inMemory(seed uint64, b breach) *simulation {
	s := newSimulation(seed, b == none)
	if b == amnesia {
		s.clockFences, s.fence = true, lock.WithClockFencing()
	}
	for range s.size {
		m := newMemory((s.rnd.Float64()*2 - 1) / 100)
		if b == drift {
			m.eaten = func(ttl time.Duration) time.Duration { return ttl/100 + 2*time.Millisecond }
		}
		s.nodes = append(s.nodes, m)
	}
	s.run(s.connect, func(ctx context.Context) { s.trouble(ctx, b) }, func(i int) (string, bool) { return s.nodes[i].holder("n") })
	return s
}

// overMiniredis runs one over the real commands and scripts, with faults on the way.
func overMiniredis(t *testing.T, seed uint64) *simulation {
	s := newSimulation(seed, true)
	minis := make([]*miniredis.Miniredis, s.size)
	for i := range minis {
		minis[i] = redistest.Mini(t)
	}
	var proxies []*redistest.Proxy
	connect := func() []lock.Store {
		stores := make([]lock.Store, s.size)
		for i, m := range minis {
			p := redistest.ProxyMini(t, m)
			proxies = append(proxies, p)
			stores[i] = lock.NewStore(p.Client(t, at(i), func(o *redis.Options) { o.ContextTimeoutEnabled = true }))
		}
		return stores
	}
	trouble := func(ctx context.Context) {
		some := func() time.Duration { return time.Duration(s.rnd.Int64N(int64(s.ttl))) }
		for ctx.Err() == nil {
			time.Sleep(some() / 2)
			first := s.rnd.IntN(len(proxies)/s.size) * s.size
			i, n := s.rnd.IntN(s.size), s.rnd.IntN(s.size) // of one process, or of a node
			var victims []*redistest.Proxy
			switch s.rnd.IntN(3) {
			case 0:
				victims = proxies[first+i : first+i+1]
			case 1:
				victims = proxies[first : first+s.size]
			case 2:
				for k := n; k < len(proxies); k += s.size {
					victims = append(victims, proxies[k])
				}
			}
			what, slow, away := s.rnd.IntN(4), some()/2, 2*some()
			for _, p := range victims {
				switch what {
				case 0:
					p.Latency(slow)
				case 1:
					p.Silence()
				case 2:
					p.RefuseAll()
					p.Cut()
				case 3:
					p.On(redistest.Any(), redistest.DropReply()).Times(2)
				}
				time.AfterFunc(away, func() {
					p.Latency(0)
					p.Heal()
				})
			}
		}
	}
	s.run(connect, trouble, func(i int) (string, bool) {
		token, err := minis[i].Get("lock:n")
		return token, err == nil
	})
	time.Sleep(10 * time.Second) // go-redis still sleeps between dials
	return s
}

// simulate runs seeds until one is violated, and returns that one; zero if none is.
func simulate(t *testing.T, from, to uint64, run func(t *testing.T, seed uint64) *simulation) (violated uint64, grants, lost int) {
	t.Helper()
	var mu sync.Mutex // guards the results
	var next atomic.Uint64
	next.Store(from - 1)
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for {
				seed := next.Add(1)
				mu.Lock()
				stop := seed >= to || violated != 0
				mu.Unlock()
				if stop {
					return
				}
				var s *simulation
				synctest.Test(t, func(t *testing.T) { s = run(t, seed) })
				mu.Lock()
				grants, lost = grants+s.grants, lost+s.lost
				if len(s.violations) > 0 && (violated == 0 || seed < violated) {
					violated = seed
					t.Logf("seed %d: %s", seed, s.violations[0])
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return violated, grants, lost
}

func memories(b breach) func(*testing.T, uint64) *simulation {
	return func(_ *testing.T, seed uint64) *simulation { return inMemory(seed, b) }
}

func TestSimulationKeepsThePromise(t *testing.T) {
	violated, grants, lost := simulate(t, *fromSeed, *fromSeed+*seeds, memories(none))
	require.Zero(t, violated, "run it again with -seed %d -seeds 1", violated)
	t.Logf("%d runs, %d grants, %d of them lost, no violation", *seeds, grants, lost)
	require.Greater(t, grants, int(*seeds))
	require.Greater(t, lost, int(*seeds)/20, "the faults are too weak to show anything")
}

func TestSimulationOverMiniredisKeepsThePromise(t *testing.T) {
	n := max(*seeds/50, 1)
	violated, grants, lost := simulate(t, *fromSeed, *fromSeed+n, overMiniredis)
	require.Zero(t, violated)
	t.Logf("%d runs, %d grants, %d of them lost, no violation", n, grants, lost)
}

func TestSimulationFindsWhatIsLeftOut(t *testing.T) {
	for name, b := range map[string]breach{"the drift allowance": drift, "that nodes remember": amnesia} {
		t.Run(name, func(t *testing.T) {
			violated, _, _ := simulate(t, 1, 50_000, memories(b))
			require.NotZero(t, violated, "a checker that finds nothing proves nothing")
		})
	}
}
