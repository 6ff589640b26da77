package load_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/internal/redistest"
)

const (
	takers   = 32
	segments = 20
	growth   = 20 << 20 // bytes of heap that noise may be
)

// failures are the ways in which one cycle in ten goes wrong. What the proxy does, it does to the first such command for
// a name: what is tried again gets through.
var failures = []failure{
	{"grant unheard", "SET", redistest.DropReply(), 0},
	{"grant swallowed", "SET", redistest.SwallowReply(), 50 * time.Millisecond},
	{"cut off", "SET", redistest.Refuse(), 0},
	{"late", "SET", redistest.DelayRequest(30 * time.Millisecond), 5 * time.Millisecond},
	{"loading", "SET", redistest.ReplyError("LOADING Redis is loading the dataset in memory"), 0},
	{"release unheard", "EVALSHA", redistest.DropReply(), 0},
	{"release swallowed", "EVALSHA", redistest.SwallowReply(), 50 * time.Millisecond},
	{kind: held}, {kind: wrongType}, {kind: refused}, {kind: cancelled},
}

type failure struct {
	kind   string
	verb   string // of the command that goes wrong; none: it is not about one
	action redistest.Action
	limit  time.Duration // of the caller's patience; none: as long as it takes
}

const (
	fine      = "fine"
	held      = "held"
	wrongType = "wrong type"
	refused   = "refused"
	cancelled = "cancelled"
)

// matches the first command of the kind for each name.
func (f failure) matches() redistest.Match {
	hit := map[string]bool{}
	return func(args []string) bool {
		at := 1
		if f.verb == "EVALSHA" {
			at = 3
		}
		if !strings.EqualFold(args[0], f.verb) || len(args) <= at || !strings.HasPrefix(args[at], "lock:"+f.kind) || hit[args[at]] {
			return false
		}
		hit[args[at]] = true
		return true
	}
}

// leaking takes and releases locks over a network that is another one in each segment: a proxy keeps all that it has
// seen, which would look like a leak.
type leaking struct {
	locker   *lock.Locker
	cycles   int
	next     int // of cycles
	proxy    atomic.Pointer[redistest.Proxy]
	refusing sync.Mutex // only one refuses all at a time

	mu       sync.Mutex
	outcomes map[string]int
}

func TestManyCyclesWithFailuresLeaveNothing(t *testing.T) {
	server := redistest.Start(t, redistest.Redis7)
	admin := server.Client(t)
	require.NoError(t, admin.Set(t.Context(), "lock:"+held, "another's", 0).Err())
	require.NoError(t, admin.RPush(t.Context(), "lock:"+wrongType, "a list").Err())
	before := runtime.NumGoroutine()

	run := &leaking{cycles: size(10_000, 1_000_000), outcomes: map[string]int{}}
	rdb := redis.NewClient(&redis.Options{
		Addr: server.Addr(), ContextTimeoutEnabled: true, PoolSize: 2 * takers,
		Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
			return run.proxy.Load().Dial(ctx, network, addr)
		},
	})
	defer rdb.Close()
	run.locker = lock.New(rdb, lock.WithTTL(5*time.Second))

	calm := redistest.ProxyTo(t, server.Addr()) // between segments, and for what is to be cleaned up in the end
	began := time.Now()
	var heaps, counts []int
	for i := range segments {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			p := redistest.ProxyTo(t, server.Addr())
			run.proxy.Store(p)
			calm.Cut() // what still comes this way would not fail, and be kept
			run.segment(t, p)
		})
		run.proxy.Store(calm)
		if i+1 >= segments/10 {
			heaps, counts = append(heaps, heap()), append(counts, runtime.NumGoroutine())
		}
	}
	took := time.Since(began)
	require.NoError(t, run.locker.Wait(within(t, time.Minute)))
	heaps = append(heaps, heap())
	t.Logf("%s: %d cycles by %d goroutines in %v (%.0f/s): heap %.1f MB after 10 %%, since then %.1f to %.1f MB, %.1f MB in the end; "+
		"goroutines %d after 10 %%, since then %d to %d; %v", about(t, admin), run.cycles, takers, took.Round(time.Second),
		float64(run.cycles)/took.Seconds(), mega(heaps[0]), mega(slices.Min(heaps)), mega(slices.Max(heaps)),
		mega(heaps[len(heaps)-1]), counts[0], slices.Min(counts), slices.Max(counts), run.outcomes)
	require.Less(t, slices.Max(heaps)-heaps[0], growth)
	require.Less(t, slices.Max(counts)-counts[0], 2*takers) // connections that close, clean-ups under way
	require.NoError(t, rdb.Close())
	eventually(t, "goroutines", func() bool { return runtime.NumGoroutine() <= before })

	require.ElementsMatch(t, []string{"lock:" + held, "lock:" + wrongType}, lockKeys(t, admin))
	require.Equal(t, "another's", admin.Get(t.Context(), "lock:"+held).Val())
	for _, impossible := range []string{"fine: not acquired", "held: acquired", "wrong type: acquired", lock.ErrLost.Error()} {
		for outcome := range run.outcomes {
			require.NotContains(t, outcome, impossible)
		}
	}
}

func mega(bytes int) float64 { return float64(bytes) / (1 << 20) }

// segment makes a part of the cycles, through a proxy of its own.
func (run *leaking) segment(t *testing.T, p *redistest.Proxy) {
	warm, err := run.locker.Acquire(t.Context(), "warm") // the server knows the scripts, so none is sent twice
	require.NoError(t, err)
	require.NoError(t, warm.Release(t.Context()))
	for _, f := range failures {
		if f.verb != "" {
			p.On(f.matches(), f.action)
		}
	}
	var next atomic.Int64
	var wg sync.WaitGroup
	for range takers {
		wg.Go(func() {
			for i := int(next.Add(1)); i <= run.cycles/segments; i = int(next.Add(1)) {
				run.cycle(t.Context(), p, run.next+i)
			}
		})
	}
	wg.Wait()
	run.next += run.cycles / segments
	for _, f := range failures {
		if f.verb != "" && run.count(f.kind) == 0 {
			t.Error(f.kind, "has not happened")
		}
	}
}

// cycle takes one lock and releases it, the tenth time with a failure.
func (run *leaking) cycle(ctx context.Context, p *redistest.Proxy, i int) {
	f := failure{kind: fine}
	if i%10 == 0 {
		f = failures[i/10%len(failures)]
	}
	l, name := run.locker, fmt.Sprintf("%s:%d", f.kind, i)
	if f.limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, f.limit)
		defer cancel()
	}
	acquire := l.Acquire
	switch f.kind {
	case held:
		name, acquire = held, l.TryAcquire
	case wrongType:
		name, acquire = wrongType, l.With(lock.WithFencing()).TryAcquire
	case cancelled:
		soon, cancel := context.WithCancel(ctx)
		ctx = soon
		go cancel()
	case refused:
		acquire = l.TryAcquire
		if i/10/len(failures)%20 == 0 { // it cuts off everybody, so it is not done each time
			run.refusing.Lock()
			defer run.refusing.Unlock()
			p.RefuseAll()
			defer p.Heal()
		}
	}
	lk, err := acquire(ctx, name)
	if err != nil {
		run.add(f.kind, "not acquired", err)
		return
	}
	run.add(f.kind, "acquired", lk.Release(ctx))
}

// add counts what became of a cycle.
func (run *leaking) add(kind, outcome string, err error) {
	for _, known := range []error{lock.ErrHeld, lock.ErrLost, lock.ErrUnknown, context.Canceled, context.DeadlineExceeded} {
		if errors.Is(err, known) {
			outcome += ", " + known.Error()
		}
	}
	if err != nil && !strings.Contains(outcome, ",") {
		outcome += ", another error"
	}
	run.mu.Lock()
	defer run.mu.Unlock()
	run.outcomes[kind+": "+outcome]++
}

// count returns how many cycles of a kind there were.
func (run *leaking) count(kind string) int {
	run.mu.Lock()
	defer run.mu.Unlock()
	n := 0
	for outcome, times := range run.outcomes {
		if strings.HasPrefix(outcome, kind+":") {
			n += times
		}
	}
	return n
}
