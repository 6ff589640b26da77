package main

import (
	"bytes"
	"context"
	"io"
	"net"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/seed-b640e7e9/lock/internal/redistest"
)

// mainVariable makes the test binary run main, as the command would.
const mainVariable = "QUICKSTART_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(taskVariable) != "" || os.Getenv(mainVariable) != "" {
		main()
	}
	goleak.VerifyTestMain(m)
}

// quickstart is run, with what it printed.
func quickstart(ctx context.Context, url string, args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	code = run(ctx, args, url, &out, &errs)
	return code, out.String(), errs.String()
}

// requireShown checks that all was shown, and that figures were counted.
func requireShown(t *testing.T, stdout string) {
	t.Helper()
	for _, pattern := range []string{
		`\d+ transfers in .* (\d|-).* (is missing|has come from nowhere)\.\n`,
		`\d+ transfers in [^\n]* 2000\.00 in all\.\n   Not a cent is missing`,
		`A is told\..*: lock: hold "ledger": .*B has the lock, with fence 2.*refused, lock: write [^\n]*stale`,
		`A was told \d+\.\d ms before B got in\.\n\nAll of this held`,
	} {
		require.Regexp(t, regexp.MustCompile("(?s)"+pattern), stdout)
	}
}

func TestEmbeddedServerShowsAllInUnderTenSeconds(t *testing.T) {
	t.Parallel()
	begin := time.Now()
	code, stdout, stderr := quickstart(t.Context(), "")
	require.Zero(t, code, stdout+stderr)
	assert.Empty(t, stderr)
	assert.Contains(t, stdout, "4 goroutines")
	requireShown(t, stdout)
	assert.Less(t, time.Since(begin), 10*time.Second)
}

func TestRealRedisWithFourProcessesShowsAllAndLeavesNothing(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t, redistest.Redis7)
	rdb := srv.Client(t)
	require.NoError(t, rdb.MSet(t.Context(), "lock:transfers", "mine", "alice", "mine").Err())

	code, stdout, stderr := quickstart(t.Context(), "redis://"+srv.Addr())
	require.Zero(t, code, stdout+stderr)
	assert.Empty(t, stderr)
	assert.Contains(t, stdout, "4 processes")
	requireShown(t, stdout)
	keys, err := rdb.Keys(t.Context(), "*").Result()
	require.NoError(t, err)
	assert.ElementsMatch(t, []string{"lock:transfers", "alice"}, keys, "the user's own keys, and no others")
}

func TestPasswordAndDatabaseOfTheURLAreUsed(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t, redistest.Redis7, "--requirepass", "s3cret")
	code, stdout, stderr := quickstart(t.Context(), "redis://:s3cret@"+srv.Addr()+"/5", "-workers", "2", "-transfers", "40")
	require.Zero(t, code, stdout+stderr)
	requireShown(t, stdout)
	assert.NotContains(t, stdout, "s3cret")

	code, _, stderr = quickstart(t.Context(), "redis://:wr0ng@"+srv.Addr())
	require.Equal(t, 1, code)
	requireOneLine(t, stderr)
	assert.NotContains(t, stderr, "wr0ng")
}

// onMini runs with a server that the caller looks into, so the workers are processes.
func onMini(t *testing.T) (m *miniredis.Miniredis, url string) {
	t.Helper()
	m = miniredis.NewMiniRedis()
	m.ClockTTL(true)
	require.NoError(t, m.Start())
	t.Cleanup(m.Close)
	return m, "redis://" + m.Addr()
}

func TestInterruptedRunFailsAndLeavesNothing(t *testing.T) {
	t.Parallel()
	for when, text := range map[string]string{
		"while money is moved": "1. Without", "under the lock": "2. With", "while A is cut off": "goes dead",
	} {
		t.Run(when, func(t *testing.T) {
			m, url := onMini(t)
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), mainVariable+"=1", "REDIS_URL="+url)
			stdout, err := cmd.StdoutPipe()
			require.NoError(t, err)
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			require.NoError(t, cmd.Start())
			readUntil(t, stdout, text)
			time.Sleep(30 * time.Millisecond)
			require.NotEmpty(t, m.Keys())
			require.NoError(t, cmd.Process.Signal(os.Interrupt))
			begin := time.Now()
			_, _ = io.Copy(io.Discard, stdout)

			exit := new(exec.ExitError)
			require.ErrorAs(t, cmd.Wait(), &exit)
			assert.Equal(t, 1, exit.ExitCode(), stderr.String())
			assert.Contains(t, stderr.String(), "quickstart: stopped: ")
			requireOneLine(t, stderr.String())
			assert.Less(t, time.Since(begin), 4*time.Second)
			assert.Empty(t, m.Keys())
		})
	}
}

func readUntil(t *testing.T, r io.Reader, text string) {
	t.Helper()
	var seen strings.Builder
	buf := make([]byte, 256)
	for !strings.Contains(seen.String(), text) {
		n, err := r.Read(buf)
		seen.Write(buf[:n])
		require.NoError(t, err, "%q did not come: %s", text, &seen)
	}
}

func TestFailingWorkerProcessFailsTheRunWithItsMessage(t *testing.T) {
	m, url := onMini(t)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	srv, err := connect(ctx, url)
	require.NoError(t, err)
	defer srv.close()
	m.SetError("ERR out of order")
	err = startProcess(ctx, task{Prefix: "x", Transfers: 1}, url, io.Discard)
	require.ErrorContains(t, err, "exit status 1: ERR out of order")
}

func TestUnreachableRedisIsOneLineAndStatus1WithinSeconds(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	closed := l.Addr().String()
	require.NoError(t, l.Close())
	silent, err := net.Listen("tcp", "127.0.0.1:0") // connections are made, and nobody answers
	require.NoError(t, err)
	defer silent.Close()

	for url, want := range map[string]string{
		"redis://" + closed:                   "can't reach Redis at " + closed,
		"redis://" + silent.Addr().String():   "can't reach Redis at " + silent.Addr().String(),
		"http://localhost":                    "REDIS_URL: redis: invalid URL scheme: http",
		"redis://:s3cret/s3cret@localhost:1x": "REDIS_URL: not redis://[user:password@]host:port[/db]",
		"localhost:6379":                      "REDIS_URL: ",
	} {
		begin := time.Now()
		code, stdout, stderr := quickstart(t.Context(), url)
		assert.Equal(t, 1, code, url)
		assert.Empty(t, stdout)
		assert.Contains(t, stderr, want)
		assert.NotContains(t, stderr, "s3cret")
		requireOneLine(t, stderr)
		assert.Less(t, time.Since(begin), 5*time.Second, url)
	}
}

func requireOneLine(t *testing.T, text string) {
	t.Helper()
	require.Equal(t, 1, strings.Count(text, "\n"), text)
	require.True(t, strings.HasPrefix(text, "quickstart: "), text)
}

func TestHelpIsNoFailureAndNonsenseIs(t *testing.T) {
	code, stdout, stderr := quickstart(t.Context(), "", "-h")
	assert.Zero(t, code)
	assert.Empty(t, stdout)
	for _, text := range []string{"REDIS_URL", "-workers", "-transfers", "-seed"} {
		assert.Contains(t, stderr, text)
	}
	for _, args := range [][]string{{"-workers", "1"}, {"-transfers", "0"}, {"-workers", "x"}, {"-nope"}, {"more"}} {
		code, stdout, stderr := quickstart(t.Context(), "", args...)
		assert.Equal(t, 2, code, args)
		assert.Empty(t, stdout)
		assert.NotEmpty(t, stderr)
	}
}

func TestWrongBalancesUnderTheLockFailTheRun(t *testing.T) {
	d := newDemo(t)
	// A thief, who does not care for locks, takes from what is read and written under them.
	ctx, cancel := context.WithCancel(t.Context())
	stolen := make(chan struct{})
	go func() {
		defer close(stolen)
		for ctx.Err() == nil {
			d.rdb.Set(ctx, d.prefix+accounts[0], 1, 0)
		}
	}()
	err := d.withLock(ctx)
	cancel()
	<-stolen
	require.ErrorContains(t, err, "with the lock Alice and Bob should have")
}

func newDemo(t *testing.T) *demo {
	t.Helper()
	srv, err := connect(t.Context(), "")
	require.NoError(t, err)
	t.Cleanup(srv.close)
	rdb := srv.client()
	t.Cleanup(func() { rdb.Close() })
	return &demo{config: config{workers: 4, transfers: 10, seed: 1}, out: io.Discard, server: srv, rdb: rdb, prefix: "{t}:"}
}

func TestExpectedBalancesAreThoseOfOneWorkerAfterAnother(t *testing.T) {
	d := newDemo(t)
	b := bank{d.rdb, d.prefix}
	require.NoError(t, b.open(t.Context()))
	for w := range d.workers {
		task := task{Prefix: d.prefix, Seed: d.seed, Worker: w, Transfers: d.transfers}
		require.NoError(t, task.run(t.Context(), d.rdb, io.Discard))
	}
	balances, err := b.balances(t.Context())
	require.NoError(t, err)
	assert.Equal(t, expected(d.seed, d.workers, d.transfers), balances)
	assert.NotEqual(t, opening, balances[0])
	assert.Equal(t, 2*opening, balances[0]+balances[1])
}

func TestCents(t *testing.T) {
	for c, want := range map[cents]string{0: "0.00", 5: "0.05", 1999_42: "1999.42", -58: "-0.58", -100_01: "-100.01"} {
		assert.Equal(t, want, c.String())
	}
}

func TestCableGoesDeadAndDeliversLater(t *testing.T) {
	m, _ := onMini(t)
	line, err := newCable("tcp", m.Addr())
	require.NoError(t, err)
	defer line.Close()
	rdb := redis.NewClient(&redis.Options{Addr: line.Addr(), MaxRetries: -1, ContextTimeoutEnabled: true})
	defer rdb.Close()
	require.NoError(t, rdb.Ping(t.Context()).Err())

	line.Cut()
	line.Cut()
	answered := make(chan error, 1)
	go func() { answered <- rdb.Ping(t.Context()).Err() }()
	select {
	case err := <-answered:
		require.Fail(t, "an answer came through", "%v", err)
	case <-time.After(50 * time.Millisecond):
	}
	line.Mend()
	require.NoError(t, <-answered)

	line.Cut()
	line.Close() // does not hang
	require.Error(t, rdb.Ping(t.Context()).Err())
}
