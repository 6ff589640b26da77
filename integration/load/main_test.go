// Package load_test holds many locks, lets many wait and takes very many one after the other, on a real server and
// through its failures. By default it is small enough for each run of the tests; -full makes it as large as the figures
// in the documents say.
package load_test

import (
	"context"
	"flag"
	"os"
	"regexp"
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock/internal/redistest"
)

var full = flag.Bool("full", false, "run at the documented size: some minutes a test")

func TestMain(m *testing.M) {
	redis.SetLogger(&logging.VoidLogger{}) // it tells of each connection that is refused on purpose
	flag.Parse()
	os.Exit(redistest.Main(m))
}

// size returns what -full asks for.
func size[T any](small, large T) T {
	if *full {
		return large
	}
	return small
}

// within returns a context for what must end, and takes as long as the machine is slow.
func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), d)
	t.Cleanup(cancel)
	return ctx
}

// eventually waits for what no event tells of.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for ctx := within(t, 30*time.Second); !is(); time.Sleep(5 * time.Millisecond) {
		require.NoError(t, ctx.Err(), what)
	}
}

func heap() int {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // what a sync.Pool keeps goes with the second
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

// clientCPU is the processor time of this process.
func clientCPU() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// info returns the figure after a name, such as "used_cpu_sys:", in the server's INFO; zero if it is not there.
func info(ctx context.Context, rdb *redis.Client, section, name string) (float64, error) {
	text, err := rdb.Info(ctx, section).Result()
	if err != nil {
		return 0, err
	}
	found := regexp.MustCompile(regexp.QuoteMeta(name) + `([0-9.]+)`).FindStringSubmatch(text)
	if found == nil {
		return 0, nil
	}
	return strconv.ParseFloat(found[1], 64)
}

func mustInfo(t *testing.T, rdb *redis.Client, section, name string) float64 {
	t.Helper()
	f, err := info(t.Context(), rdb, section, name)
	require.NoError(t, err)
	return f
}

func serverCPU(t *testing.T, rdb *redis.Client) time.Duration {
	t.Helper()
	seconds := mustInfo(t, rdb, "cpu", "used_cpu_user:") + mustInfo(t, rdb, "cpu", "used_cpu_sys:")
	return time.Duration(seconds * float64(time.Second))
}

// about is what a figure has to be read with.
func about(t *testing.T, rdb *redis.Client) string {
	t.Helper()
	text, err := rdb.Info(t.Context(), "server").Result()
	require.NoError(t, err)
	version := regexp.MustCompile(`redis_version:(\S+)`).FindStringSubmatch(text)
	require.NotNil(t, version)
	return time.Now().Format("2006-01-02") + ", Redis " + version[1] + ", " + strconv.Itoa(runtime.NumCPU()) + " cores"
}

// lockKeys returns the keys of locks that are there.
func lockKeys(t *testing.T, rdb *redis.Client) []string {
	t.Helper()
	var left []string
	ctx := within(t, time.Minute)
	all := rdb.Scan(ctx, 0, "lock:*", 1000).Iterator()
	for all.Next(ctx) {
		left = append(left, all.Val())
	}
	require.NoError(t, all.Err())
	return left
}

// obedient makes a client obey deadlines, as the README recommends.
func obedient(o *redis.Options) { o.ContextTimeoutEnabled = true }
