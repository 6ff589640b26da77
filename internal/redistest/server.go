package redistest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// Kind is a server program. Its value is fit for the name of a subtest.
type Kind string

// What servers.sh brings.
const (
	Redis7  Kind = "redis7"  // Redis 7.0
	Redis8  Kind = "redis8"  // Redis 8.0
	Valkey9 Kind = "valkey9" // Valkey 9.1
)

// Kinds returns every kind there is.
func Kinds() []Kind { return []Kind{Redis7, Redis8, Valkey9} }

const (
	fetchCommand = "bash internal/redistest/servers.sh"
	pollPause    = 5 * time.Millisecond // between two looks at a server that cannot tell by itself
	startTries   = 3                    // somebody else may take a free port before the server does
)

// Server is a server process of the test's own. Real servers need real time: they are of no use in a bubble.
type Server struct {
	// Kind is what program it runs.
	Kind Kind

	addr string
	dir  string
	argv []string

	mu   sync.Mutex // guards proc
	proc *process
}

// Start runs a server on a free port of 127.0.0.1 until the test ends. It persists nothing unless args, which are those
// of the program's command line ("--appendonly", "yes"), say so.
func Start(tb testing.TB, kind Kind, args ...string) *Server {
	tb.Helper()
	return startIn(tb, kind, tb.TempDir(), args)
}

// startIn runs a server with its files in dir.
func startIn(tb testing.TB, kind Kind, dir string, args []string) *Server {
	tb.Helper()
	need(tb, kind)
	s, err := launch(kind, dir, args)
	if err != nil {
		tb.Fatal("redistest:", err)
	}
	tb.Cleanup(s.Kill)
	return s
}

// confFile is the configuration file in a server's folder, usually empty. What args say goes first.
const confFile = "server.conf"

// launch runs a server and returns once it answers.
func launch(kind Kind, dir string, args []string) (s *Server, err error) {
	conf, err := os.OpenFile(filepath.Join(dir, confFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	defer conf.Close()
	for range startTries {
		var port string
		if port, err = freePort(); err != nil {
			return nil, err
		}
		s = &Server{Kind: kind, dir: dir, addr: net.JoinHostPort("127.0.0.1", port)}
		s.argv = append([]string{
			kind.binary(), conf.Name(),
			"--port", port, "--bind", "127.0.0.1", "--dir", dir, "--save", "", "--appendonly", "no",
		}, args...)
		if err = s.start(); err == nil {
			return s, nil
		}
	}
	return nil, err
}

func (s *Server) start() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	log := filepath.Join(s.dir, "log")
	proc, err := startProcess(log, s.argv)
	if err != nil {
		return err
	}
	if err := awaitPing(s.addr, proc.exited); err != nil {
		proc.kill()
		text, _ := os.ReadFile(log)
		return fmt.Errorf("%s at %s: %w\n%s", s.Kind, s.addr, err, text)
	}
	s.proc = proc
	return nil
}

// Addr returns host and port.
func (s *Server) Addr() string { return s.addr }

// Client returns a client that the test closes.
func (s *Server) Client(tb testing.TB, opts ...func(*redis.Options)) *redis.Client {
	tb.Helper()
	return newClient(tb, s.addr, nil, opts)
}

// Pause stops the process without ending it. Its connections stay open, and the kernel makes new ones on its behalf.
func (s *Server) Pause() { s.signal(syscall.SIGSTOP) }

// Resume lets a paused process go on, with all that has come in since.
func (s *Server) Resume() { s.signal(syscall.SIGCONT) }

// signal panics where the process is gone: that is a mistake in a test.
func (s *Server) signal(sig syscall.Signal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.proc.signal(sig); err != nil {
		panic(fmt.Sprintf("redistest: %v for %s at %s: %v", sig, s.Kind, s.addr, err))
	}
}

// Kill ends the process as a crash would, and returns when it is gone.
func (s *Server) Kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.proc.kill()
}

// Restart kills the process, if it runs, and starts it again with the same port, folder and arguments.
func (s *Server) Restart(tb testing.TB) {
	tb.Helper()
	s.Kill()
	if err := s.start(); err != nil {
		tb.Fatal("redistest:", err)
	}
}

// need skips the test where the program is missing. In CI it must not be.
func need(tb testing.TB, kind Kind) {
	tb.Helper()
	if _, err := exec.LookPath(kind.binary()); err == nil {
		return
	}
	msg := fmt.Sprintf("redistest: %s is missing, to get it run: %s", kind, fetchCommand)
	if os.Getenv("CI") == "true" {
		tb.Fatal(msg)
	}
	tb.Skip(msg)
}

func (k Kind) binary() string {
	switch k {
	case Redis7:
		return "redis-server"
	case Redis8, Valkey9:
		return filepath.Join(cacheDir(), string(k)+"-server")
	}
	panic(fmt.Sprintf("redistest: unknown kind %q", k))
}

// cacheDir is where servers.sh puts what it fetches.
func cacheDir() string {
	if dir := os.Getenv("LOCK_REDISTEST_DIR"); dir != "" {
		return dir
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		dir = os.TempDir()
	}
	return filepath.Join(dir, "lock-redistest")
}

// freePort picks a port that nobody listens on, below those that the kernel gives to clients: one of these could be taken
// by any connection while a server is down between Kill and Restart.
func freePort() (string, error) {
	var err error
	for range 100 {
		port := strconv.Itoa(10000 + rand.IntN(20000))
		var l net.Listener
		if l, err = net.Listen("tcp", net.JoinHostPort("127.0.0.1", port)); err == nil {
			return port, l.Close()
		}
	}
	return "", err
}

// awaitPing returns once the server answers to PING, be it that a password is needed.
func awaitPing(addr string, exited <-chan struct{}) error {
	ctx, stop := context.WithTimeout(context.Background(), waitLimit)
	defer stop()
	return poll(ctx, func() error {
		select {
		case <-exited:
			return permanentError{errors.New("exited at once")}
		default:
			return ping(ctx, addr)
		}
	})
}

func ping(ctx context.Context, addr string) error {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	_ = conn.SetDeadline(deadline)
	if _, err := conn.Write([]byte("PING\r\n")); err != nil {
		return err
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	ready := func(prefix string) bool { return strings.HasPrefix(line, prefix) }
	if err == nil && !slices.ContainsFunc([]string{"+PONG", "-NOAUTH", "-MASTERDOWN"}, ready) {
		err = errors.New(strings.TrimSpace(line))
	}
	return err
}

// permanentError ends a poll.
type permanentError struct{ error }

// poll calls try until it succeeds, and returns its last error where it does not before ctx ends.
func poll(ctx context.Context, try func() error) error {
	tick := time.NewTicker(pollPause)
	defer tick.Stop()
	for {
		err := try()
		if err == nil || errors.As(err, new(permanentError)) {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return err
		}
	}
}
