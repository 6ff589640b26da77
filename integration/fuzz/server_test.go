package fuzz_test

import (
	"bufio"
	"context"
	"crypto/sha1"
	"encoding/hex"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/internal/redistest"
)

// storm is more commands than any scenario has a reason for.
const storm = 5_000

// liar is a server that shakes hands as Redis does, and then answers to each command what it was told beforehand,
// whatever the command is.
type liar struct {
	resp3   bool
	scripts map[string]string // by hash, what they do
	serving sync.WaitGroup    // connections

	mu       sync.Mutex
	replies  *source
	received []received
	stormed  bool
}

// received is a command and what was answered.
type received struct {
	does  string // "set", the name of a script, or something else
	key   string
	args  []string // the rest
	at    time.Time
	reply value
}

func (r received) ttl() time.Duration {
	for _, i := range []int{1, 2} { // token and TTL; or token, "px" and TTL
		if len(r.args) > i {
			if ms, err := strconv.ParseInt(r.args[i], 10, 64); err == nil {
				return time.Duration(ms) * time.Millisecond
			}
		}
	}
	return 0
}

// dial is a dialer for redis.Options.
func (s *liar) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	here, there := net.Pipe()
	s.serving.Go(func() { s.serve(there) })
	return here, nil
}

func (s *liar) serve(conn net.Conn) {
	defer conn.Close()
	r := bufio.NewReaderSize(conn, 1<<16) // a pipe has no buffer: what is sent together must be read together
	for {
		args, err := command(r)
		if err != nil {
			return
		}
		if reply := s.handshake(args); reply != "" {
			if _, err := io.WriteString(conn, reply); err != nil {
				return
			}
			continue
		}
		v := s.answer(args)
		time.Sleep(v.delay)
		if _, err := io.WriteString(conn, v.text); err != nil || v.hangUp {
			return
		}
	}
}

// handshake answers what a connection begins with.
func (s *liar) handshake(args []string) string {
	switch strings.ToUpper(args[0]) {
	case "HELLO":
		if s.resp3 {
			return "%3\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$5\r\n8.0.0\r\n$5\r\nproto\r\n:3\r\n"
		}
		return "-ERR unknown command 'HELLO'\r\n"
	case "CLIENT":
		if len(args) > 1 && strings.EqualFold(args[1], "SETINFO") {
			return "+OK\r\n"
		}
		return "-ERR unknown subcommand\r\n"
	}
	return ""
}

// answer records a command and returns the next reply.
func (s *liar) answer(args []string) value {
	s.mu.Lock()
	defer s.mu.Unlock()
	rec := received{does: strings.ToLower(args[0]), at: time.Now()}
	switch {
	case rec.does == "set" && len(args) > 2:
		rec.key, rec.args = args[1], args[2:]
	case strings.HasPrefix(rec.does, "eval") && len(args) > 3:
		hash := args[1]
		if rec.does == "eval" {
			hash = sha(args[1])
		}
		keys, _ := strconv.Atoi(args[2])
		rec.does, rec.key, rec.args = s.scripts[hash], args[3], args[3+keys:]
	}
	if len(s.received) >= storm {
		s.stormed = true
		return value{text: "-ERR storm\r\n", kind: '-', str: "ERR storm"}
	}
	rec.reply = s.replies.next()
	s.received = append(s.received, rec)
	return rec.reply
}

// all returns what was received for a key, in order.
func (s *liar) all(key string) []received {
	s.mu.Lock()
	defer s.mu.Unlock()
	var about []received
	for _, r := range s.received {
		if r.key == key {
			about = append(about, r)
		}
	}
	return about
}

// command reads one command.
func command(r *bufio.Reader) ([]string, error) {
	n, err := header(r)
	if err != nil || n < 1 {
		return nil, io.ErrUnexpectedEOF
	}
	args := make([]string, n)
	for i := range args {
		size, err := header(r)
		if err != nil {
			return nil, err
		}
		b := make([]byte, size+2)
		if _, err := io.ReadFull(r, b); err != nil {
			return nil, err
		}
		args[i] = string(b[:size])
	}
	return args, nil
}

func header(r *bufio.Reader) (int, error) {
	line, err := r.ReadString('\n')
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(line[1:]))
}

func sha(text string) string {
	sum := sha1.Sum([]byte(text))
	return hex.EncodeToString(sum[:])
}

// scriptsByHash finds out which script does what, by use: their text is not for others to know.
func scriptsByHash(tb testing.TB) map[string]string {
	tb.Helper()
	ctx := tb.Context()
	m := redistest.Mini(tb)
	p := redistest.ProxyMini(tb, m)
	l := lock.New(p.Client(tb, obedient), lock.WithFencing())
	does := map[string]string{}
	learn := func(what string) {
		for _, c := range p.Commands() {
			if strings.EqualFold(c.Args[0], "eval") && does[sha(c.Args[1])] == "" {
				does[sha(c.Args[1])] = what
			}
		}
	}
	lk, err := l.TryAcquire(ctx, "a")
	require.NoError(tb, err)
	learn("acquire")
	require.NoError(tb, lk.Extend(ctx, time.Minute))
	learn("renew")
	require.NoError(tb, lk.Release(ctx))
	learn("release")
	lk, err = l.With(lock.WithMinHold(time.Millisecond)).TryAcquire(ctx, "b")
	require.NoError(tb, err)
	require.NoError(tb, lk.Release(ctx))
	learn("hold")
	lk, err = l.Acquire(ctx, "c")
	require.NoError(tb, err)
	asked := p.On(redistest.All(redistest.Cmd("EVAL"), redistest.Arg("lock:c")), redistest.Watch())
	done := make(chan error)
	go func() { done <- l.Do(ctx, "c", func(context.Context) error { return nil }) }()
	asked.Wait(tb, 1) // there are grants to follow
	require.NoError(tb, lk.Release(ctx))
	require.NoError(tb, <-done)
	learn("prolong")
	require.NoError(tb, l.Wait(ctx))
	require.Len(tb, does, 5)
	return does
}
