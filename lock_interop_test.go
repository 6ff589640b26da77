package lock_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/internal/redistest"
)

// redisPy is redis-py's Lock behind lines of text: "acquire" and "release" are answered by what it says.
const redisPy = `
import sys, redis
client = redis.Redis(host=sys.argv[1], port=int(sys.argv[2]))
lock = redis.lock.Lock(client, sys.argv[3], timeout=60, blocking=False)
for line in sys.stdin:
    try:
        if line.strip() == "acquire":
            print(lock.acquire(), flush=True)
        else:
            lock.release()
            print("released", flush=True)
    except redis.exceptions.LockError as e:
        print(type(e).__name__, flush=True)
`

// python is Debian's, for which python3-redis is packaged; another one on the PATH may not have it.
const python = "/usr/bin/python3"

func TestRedisPyAndThisLibraryExcludeEachOther(t *testing.T) {
	server := redistest.Shared(t, redistest.Redis7)
	const name = "interop"
	ask := startRedisPy(t, server.Addr(), "lock:"+name)
	l := lock.New(server.Client(t))

	ours, err := l.TryAcquire(t.Context(), name)
	require.NoError(t, err)
	require.Equal(t, "False", ask("acquire"))
	require.Equal(t, "LockError", ask("release"))
	require.True(t, ours.Valid())
	release(t, ours)

	require.Equal(t, "True", ask("acquire"))
	_, err = l.TryAcquire(t.Context(), name)
	require.ErrorIs(t, err, lock.ErrHeld)
	require.NoError(t, ours.Release(t.Context()), "it was released before, and that is all")
	require.Equal(t, "released", ask("release"), "its lock was not harmed")

	ours, err = l.TryAcquire(t.Context(), name)
	require.NoError(t, err)
	release(t, ours)

	require.Equal(t, "True", ask("acquire"))
	rdb := server.Client(t)
	require.NoError(t, rdb.Del(t.Context(), "lock:"+name).Err()) // its lease runs out
	ours, err = l.TryAcquire(t.Context(), name)
	require.NoError(t, err)
	require.Equal(t, "LockNotOwnedError", ask("release"))
	require.NoError(t, ours.Extend(t.Context(), time.Minute), "ours was not harmed either")
	release(t, ours)
}

// startRedisPy returns a way to ask redis-py's Lock on a key.
func startRedisPy(t *testing.T, addr, key string) (ask func(string) string) {
	t.Helper()
	if err := exec.Command(python, "-c", "import redis").Run(); err != nil {
		const missing = "python3-redis is missing; bash internal/redistest/servers.sh brings it"
		if os.Getenv("CI") == "true" {
			t.Fatal(missing)
		}
		t.Skip(missing)
	}
	host, port, err := net.SplitHostPort(addr)
	require.NoError(t, err)
	cmd := exec.Command(python, "-c", redisPy, host, port, key)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = stdin.Close()
		_ = cmd.Wait()
	})
	answers := bufio.NewReader(stdout)
	return func(question string) string {
		t.Helper()
		_, err := fmt.Fprintln(stdin, question)
		require.NoError(t, err)
		line, err := answers.ReadString('\n')
		if err != io.EOF {
			require.NoError(t, err)
		}
		return strings.TrimSpace(line)
	}
}
