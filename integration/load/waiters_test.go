package load_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
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
	processes = 4
	sample    = 100 * time.Millisecond
)

// waiting is a crowd that wants a few names.
type waiting struct {
	names []atomic.Int32 // how many are inside
	some  chan struct{}  // closed when a tenth has been served

	served, told, lost, other, overlaps atomic.Int64
}

// TestEachOfManyWaitersIsServedOrToldThroughARestart: a tenth of the waiters gives up while the server is down. All
// others want to be served, however long it takes.
func TestEachOfManyWaitersIsServedOrToldThroughARestart(t *testing.T) {
	n, names := size(1_000, 10_000), size(20, 100)
	server := redistest.Start(t, redistest.Redis7, "--appendonly", "yes", "--appendfsync", "always")
	admin := server.Client(t)
	before := runtime.NumGoroutine()

	w := &waiting{names: make([]atomic.Int32, names), some: make(chan struct{})}
	lockers, clients := make([]*lock.Locker, processes), make([]*redis.Client, processes)
	for i := range lockers {
		clients[i] = server.Client(t, obedient)
		lockers[i] = lock.New(clients[i], lock.WithTTL(3*time.Second))
	}
	m := measure(server.Client(t, func(o *redis.Options) { o.MaxRetries = -1 }))
	impatient, give := context.WithCancel(t.Context())
	defer give()
	began := time.Now()
	var all sync.WaitGroup
	for i := range n {
		ctx := t.Context()
		if i%10 == 9 {
			ctx = impatient
		}
		all.Go(func() { w.visit(ctx, lockers[i%processes], i/processes%names, n) })
	}
	<-w.some
	down := time.Now()
	server.Kill()
	servedBefore := w.served.Load()
	give()
	time.Sleep(500 * time.Millisecond) // the length of the fault, not a wait for anything
	server.Restart(t)
	up := time.Now()
	all.Wait()
	took := time.Since(began)
	for _, l := range lockers {
		require.NoError(t, l.Wait(within(t, time.Minute)))
	}
	commands, peak, calls := m.stop()
	t.Logf("%s: %d waiters of %d processes on %d names, server down after %v for %v, all done after %v: %d served (%d before), %d gave up, "+
		"%d of the served lost the lock, %d other errors; server: %d commands, those in scripts too (%.1f a section), at most %d in %v; since the restart %d calls of scripts",
		about(t, admin), n, processes, names, down.Sub(began).Round(time.Millisecond), up.Sub(down).Round(time.Millisecond), took.Round(time.Millisecond),
		w.served.Load(), servedBefore, w.told.Load(), w.lost.Load(), w.other.Load(), commands, float64(commands)/float64(w.served.Load()), peak, sample, calls)
	require.EqualValues(t, n, w.served.Load()+w.told.Load())
	require.Zero(t, w.other.Load())
	require.Zero(t, w.overlaps.Load())
	// No storm: of those who want a name only one of each process asks. When the server is back each of them tries, subscribes
	// and tries again, some commands of a script each time; and a release, which is four commands, wakes no more than one
	// of each process. Everybody else is served without a command.
	heads := processes * names
	require.Less(t, peak, 20*heads)
	require.Less(t, commands, 10*n)
	require.Empty(t, lockKeys(t, admin))
	for _, rdb := range clients {
		require.NoError(t, rdb.Close())
	}
	eventually(t, "goroutines", func() bool { return runtime.NumGoroutine() <= before+2 }) // admin's connection
}

// visit waits for a name, and stays under the lock for a moment.
func (w *waiting) visit(ctx context.Context, l *lock.Locker, name, n int) {
	ran := false
	err := l.Do(ctx, fmt.Sprintf("waiters:%d", name), func(ctx context.Context) error {
		ran = true
		if w.names[name].Add(1) != 1 {
			w.overlaps.Add(1)
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
		}
		w.names[name].Add(-1)
		if w.served.Add(1) == int64(n/10) {
			close(w.some)
		}
		return nil
	})
	switch {
	case ran && errors.Is(err, lock.ErrLost):
		w.lost.Add(1)
	case ran && err == nil:
	case !ran && errors.Is(err, context.Canceled):
		w.told.Add(1)
	default:
		w.other.Add(1)
	}
}

// meter samples how many commands a server runs. Its own are few.
type meter struct {
	rdb   *redis.Client
	quit  chan struct{}
	ended chan struct{}

	total, peak, last, calls float64
}

func measure(rdb *redis.Client) *meter {
	m := &meter{rdb: rdb, quit: make(chan struct{}), ended: make(chan struct{})}
	go m.run()
	return m
}

func (m *meter) run() {
	defer close(m.ended)
	tick := time.NewTicker(sample)
	defer tick.Stop()
	for {
		m.look()
		select {
		case <-tick.C:
		case <-m.quit:
			m.look()
			return
		}
	}
}

func (m *meter) look() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	now, err := info(ctx, m.rdb, "stats", "total_commands_processed:")
	if err != nil {
		return // it is down
	}
	if now < m.last {
		m.last = 0 // it has been restarted, and counts from there
	}
	m.total, m.peak, m.last = m.total+now-m.last, max(m.peak, now-m.last), now
	m.calls, _ = info(ctx, m.rdb, "commandstats", "cmdstat_evalsha:calls=")
}

// stop returns how many commands there were, the most between two samples, and how many calls of scripts since the
// server's last start.
func (m *meter) stop() (total, peak, calls int) {
	close(m.quit)
	<-m.ended
	return int(m.total), int(m.peak), int(m.calls)
}
