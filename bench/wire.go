package main

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// wire makes connections that count the commands sent through them and, with a delay, make each round trip longer.
type wire struct {
	delay    time.Duration
	commands atomic.Int64
}

func (w *wire) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	if w.delay > 0 {
		conn = slow(conn, w.delay)
	}
	return &counted{Conn: conn, wire: w}, nil
}

// counted counts commands, which are RESP arrays of strings.
type counted struct {
	net.Conn
	wire *wire

	mu   sync.Mutex
	skip int  // bytes of a string, and its line end
	kind byte // what the line began with that is being read
	n    int  // the number on it
}

func (c *counted) Write(b []byte) (int, error) {
	c.mu.Lock()
	c.count(b)
	c.mu.Unlock()
	return c.Conn.Write(b)
}

func (c *counted) count(b []byte) {
	for i := 0; i < len(b); {
		if c.skip > 0 {
			n := min(c.skip, len(b)-i)
			c.skip -= n
			i += n
			continue
		}
		switch ch := b[i]; {
		case c.kind == 0:
			c.kind, c.n = ch, 0
		case ch >= '0' && ch <= '9':
			c.n = 10*c.n + int(ch-'0')
		case ch == '\n':
			if c.kind == '*' {
				c.wire.commands.Add(1)
			} else {
				c.skip = c.n + 2
			}
			c.kind = 0
		}
		i++
	}
}

// slow returns a connection on which all that arrives is delayed.
func slow(conn net.Conn, delay time.Duration) net.Conn {
	here, there := net.Pipe()
	type piece struct {
		data []byte
		at   time.Time
	}
	arrived := make(chan piece, 1024)
	go func() { // from the server, to be delayed
		defer close(arrived)
		for {
			buf := make([]byte, 16<<10)
			n, err := conn.Read(buf)
			if n > 0 {
				arrived <- piece{buf[:n], time.Now().Add(delay)}
			}
			if err != nil {
				return
			}
		}
	}()
	go func() {
		defer there.Close()
		for p := range arrived {
			time.Sleep(time.Until(p.at))
			if _, err := there.Write(p.data); err != nil {
				conn.Close()
			}
		}
	}()
	go func() { // to the server
		defer conn.Close()
		buf := make([]byte, 16<<10)
		for {
			n, err := there.Read(buf)
			if err != nil {
				return
			}
			if _, err := conn.Write(buf[:n]); err != nil {
				return
			}
		}
	}()
	return here
}
