package lock_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/internal/redistest"
)

// A holder is a child process: this test binary, run again with these variables.
const (
	holderAddr = "LOCK_TEST_HOLDER_ADDR"
	holderTTL  = "LOCK_TEST_HOLDER_TTL"
)

// TestHolderProcess is the child's main: it holds the lock "n" until SIGTERM. Each line on its standard input makes it
// say whether it still thinks it holds the lock, and write "child" to "value" with its fence.
func TestHolderProcess(t *testing.T) {
	addr := os.Getenv(holderAddr)
	if addr == "" {
		return // not the child
	}
	ttl, err := time.ParseDuration(os.Getenv(holderTTL))
	require.NoError(t, err)
	rdb := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true})
	defer rdb.Close()
	l := lock.New(rdb, lock.WithTTL(ttl), lock.WithFencing())
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	err = l.Do(ctx, "n", func(ctx context.Context) error {
		lk, _ := lock.FromContext(ctx)
		fmt.Println("held")
		questions := make(chan struct{})
		go func() {
			for in := bufio.NewScanner(os.Stdin); in.Scan(); {
				questions <- struct{}{}
			}
		}()
		for {
			select {
			case <-questions:
			case <-ctx.Done():
				if !errors.Is(context.Cause(ctx), lock.ErrLost) {
					return nil
				}
				<-questions // a holder that has lost its lock is asked all the same
			}
			valid := lk.Valid()
			fmt.Println(valid, lk.Fence().Set(context.Background(), rdb, "value", "child"))
			if !valid {
				return nil
			}
		}
	})
	fmt.Println("ended", err)
}

// holder starts a child that holds the lock "n", and returns when it does.
func holder(t *testing.T, server *redistest.Server, ttl time.Duration) (cmd *exec.Cmd, ask func() string, line func() string) {
	t.Helper()
	cmd = exec.Command(os.Args[0], "-test.run=^TestHolderProcess$", "-test.timeout=2m")
	cmd.Env = append(os.Environ(), holderAddr+"="+server.Addr(), holderTTL+"="+ttl.String())
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	lines := bufio.NewScanner(stdout)
	line = func() string {
		t.Helper()
		require.True(t, lines.Scan())
		return strings.TrimSpace(lines.Text())
	}
	require.Equal(t, "held", line())
	return cmd, func() string {
		t.Helper()
		_, err := fmt.Fprintln(stdin)
		require.NoError(t, err)
		return line()
	}, line
}

func TestC16AnOrderlyStopHandsOver(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, redistest.Redis7)
	cmd, _, line := holder(t, server, 20*time.Second)
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	start := time.Now()
	lk := acquire(t, lock.New(server.Client(t)), "n")
	require.Less(t, time.Since(start), 10*time.Second, "well before the TTL")
	require.Equal(t, "ended <nil>", line(), "it had released before it exited")
	release(t, lk)
}

func TestC16ACrashCostsATTL(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, redistest.Redis7)
	rdb := server.Client(t)
	cmd, _, _ := holder(t, server, 2*time.Second)
	require.NoError(t, cmd.Process.Signal(syscall.SIGKILL))
	_ = cmd.Wait()
	left := rdb.PTTL(t.Context(), "lock:n").Val()
	start := time.Now()
	lk := acquire(t, lock.New(rdb), "n")
	require.GreaterOrEqual(t, time.Since(start), left-50*time.Millisecond)
	require.Less(t, time.Since(start), left+5*time.Second)
	release(t, lk)
}

func TestC17NothingRenewsAfterARelease(t *testing.T) {
	server := redistest.Start(t, redistest.Redis7)
	p := redistest.ProxyTo(t, server.Addr())
	rdb := p.Client(t)
	const ttl = 30 * time.Millisecond
	l := lock.New(rdb, lock.WithTTL(ttl))
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 2500 {
				ctx, cancel := context.WithCancel(context.Background())
				if i%3 == 0 {
					time.AfterFunc(rand.N(300*time.Microsecond), cancel)
				}
				if lk, err := l.Acquire(ctx, fmt.Sprintf("%d:%d", w, i%10)); err == nil {
					_ = lk.Release(ctx) // a loss is possible with so short a TTL on a busy machine
				}
				cancel()
			}
		})
	}
	wg.Wait()
	settle(t, l)
	require.Eventually(t, func() bool { return rdb.DBSize(t.Context()).Val() == 0 }, 10*time.Second, ttl, "no key is left")
	n := p.Count(redistest.Cmd("EVALSHA", "EVAL"))
	timer := time.NewTimer(3 * ttl)
	<-timer.C
	require.Equal(t, n, p.Count(redistest.Cmd("EVALSHA", "EVAL")), "nothing is sent any more")
}

func TestC18DoIsToldBeforeTheNextHolderGetsIn(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		const ttl = 2 * time.Second
		other := w.direct(t)
		var told time.Time
		next := make(chan *lock.Lock)
		err := w.locker(t, lock.WithTTL(ttl)).Do(t.Context(), "n", func(ctx context.Context) error {
			go func() { next <- acquire(t, other, "n") }()
			time.Sleep(time.Second)
			w.proxy.Silence()
			<-ctx.Done()
			told = time.Now()
			require.ErrorIs(t, context.Cause(ctx), lock.ErrLost)
			lk := <-next
			require.True(t, told.Before(time.Now()), "told before the other got in")
			time.Sleep(6*time.Second - w.elapsed())
			w.proxy.Heal()
			time.Sleep(time.Second)
			require.True(t, lk.Valid())
			require.NoError(t, lk.Extend(context.Background(), time.Minute), "the healed network brings the other no harm")
			release(t, lk)
			return nil
		})
		require.ErrorIs(t, err, lock.ErrLost)
	})
}

func TestC19ALostLockIsNotRevivedAndTheNextIsRenewed(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		l := w.locker(t, lock.WithTTL(time.Second))
		lk := acquire(t, l, "n")
		w.mini.Del("lock:n")
		require.ErrorIs(t, lk.Extend(t.Context(), time.Minute), lock.ErrLost)
		require.False(t, w.mini.Exists("lock:n"))

		lk = acquire(t, l, "n")
		start := time.Now()
		w.mini.Del("lock:n")
		<-lk.Context().Done()
		require.LessOrEqual(t, time.Since(start), time.Second/3)
		require.False(t, w.mini.Exists("lock:n"))

		lk = acquire(t, l, "n")
		time.Sleep(5 * time.Second)
		require.True(t, lk.Valid())
		release(t, lk)
	})
}

func TestC21AFrozenHolderIsToldAtOnceAndItsWriteRefused(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, redistest.Redis7)
	rdb := server.Client(t)
	cmd, ask, line := holder(t, server, time.Second)
	require.Equal(t, "true <nil>", ask())
	require.NoError(t, cmd.Process.Signal(syscall.SIGSTOP))
	lk := acquire(t, lock.New(rdb, lock.WithFencing(), lock.WithTTL(time.Minute)), "n")
	require.NoError(t, lk.Fence().Set(t.Context(), rdb, "value", "next"))
	require.NoError(t, cmd.Process.Signal(syscall.SIGCONT))
	answer := ask()
	require.Contains(t, answer, "false", "Valid looks at the clock")
	require.Contains(t, answer, "stale fence")
	require.Contains(t, line(), "lost")
	require.Equal(t, "next", rdb.Get(t.Context(), "value").Val())
	require.True(t, lk.Valid())
	require.NoError(t, lk.Extend(t.Context(), time.Minute), "untouched")
	release(t, lk)
}

func TestC22RenewalsHaveTheirOwnWayToRedis(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, redistest.Redis7)
	for _, inline := range []bool{false, true} {
		rdb := server.Client(t, func(o *redis.Options) { o.PoolSize, o.ContextTimeoutEnabled = 1, inline })
		other := lock.New(server.Client(t))
		l := lock.New(rdb, lock.WithTTL(2*time.Second))
		name := fmt.Sprint("pool", inline)
		err := l.Do(t.Context(), name, func(ctx context.Context) error {
			_, popped := rdb.BLPop(ctx, 6*time.Second, "nothing").Result() // takes the only connection
			if err := ctx.Err(); err != nil {
				return err
			}
			require.ErrorIs(t, popped, redis.Nil)
			require.ErrorIs(t, other.TryDo(context.Background(), name, func(context.Context) error { return nil }), lock.ErrHeld)
			return nil
		})
		require.NoError(t, err, "renewed meanwhile")
	}
}
