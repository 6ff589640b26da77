package redistest

import (
	"os"
	"sync"
	"testing"
)

// shared holds the servers of the test process.
var shared struct {
	mu      sync.Mutex // guards the fields below
	open    bool       // within Main
	servers map[Kind]*Server
}

// Shared returns the one server of a kind that all tests of the process use, and starts it for the first. Tests keep out
// of each other's way by names that only they use, and leave its life and its configuration alone: for anything else
// there is [Start]. The package needs a TestMain that calls [Main].
func Shared(tb testing.TB, kind Kind) *Server {
	tb.Helper()
	need(tb, kind)
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if !shared.open {
		tb.Fatal("redistest: Shared needs a TestMain that calls Main")
	}
	if s, ok := shared.servers[kind]; ok {
		return s
	}
	s, err := launchShared(kind)
	if err != nil {
		tb.Fatal("redistest:", err)
	}
	shared.servers[kind] = s
	return s
}

func launchShared(kind Kind) (*Server, error) {
	dir, err := os.MkdirTemp("", "redistest")
	if err != nil {
		return nil, err
	}
	s, err := launch(kind, dir, nil)
	if err != nil {
		_ = os.RemoveAll(dir)
	}
	return s, err
}

// Main runs the tests, ends the servers of [Shared] and returns the exit code:
//
//	func TestMain(m *testing.M) { os.Exit(redistest.Main(m)) }
func Main(m *testing.M) int {
	shared.mu.Lock()
	shared.open, shared.servers = true, make(map[Kind]*Server)
	shared.mu.Unlock()
	defer endShared()
	return m.Run()
}

func endShared() {
	shared.mu.Lock()
	defer shared.mu.Unlock()
	for _, s := range shared.servers {
		s.Kill()
		_ = os.RemoveAll(s.dir)
	}
	shared.open, shared.servers = false, nil
}
