package redistest

import (
	"net"
	"os"
	"sync"
	"time"
)

// flushLimit bounds how long a closed bufferedConn goes on writing what was written before the Close.
const flushLimit = 250 * time.Millisecond

// bufferedConn is a conn whose Write returns at once. A net.Pipe has no buffer: a client that writes a long pipeline
// before it reads the first reply, as they all do, blocks a server that writes the first reply before it reads on. The
// kernel's buffers prevent that on a socket; this one, which has no limit, prevents it on a pipe.
//
// As on a socket, what was written before Close still arrives.
type bufferedConn struct {
	net.Conn // read from directly; written to by flush alone

	mu            sync.Mutex // guards the fields below
	unsent        []byte
	err           error // what Write answers, once set
	closed        bool
	writeDeadline time.Time

	wake chan struct{} // tells flush that there is something to do
}

func buffered(conn net.Conn) *bufferedConn {
	c := &bufferedConn{Conn: conn, wake: make(chan struct{}, 1)}
	go c.flush()
	return c
}

func (c *bufferedConn) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return 0, c.err
	}
	if !c.writeDeadline.IsZero() && !time.Now().Before(c.writeDeadline) {
		return 0, os.ErrDeadlineExceeded
	}
	c.unsent = append(c.unsent, b...)
	c.notify()
	return len(b), nil
}

func (c *bufferedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if err == nil {
		return n, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		err = net.ErrClosed
	}
	return n, err
}

// Close ends reads and writes at once, and the connection as soon as the rest has been written.
func (c *bufferedConn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	c.closed, c.err = true, net.ErrClosed
	_ = c.Conn.SetReadDeadline(time.Unix(1, 0))
	_ = c.Conn.SetWriteDeadline(time.Now().Add(flushLimit))
	c.notify()
	return nil
}

func (c *bufferedConn) SetDeadline(t time.Time) error {
	if err := c.SetReadDeadline(t); err != nil {
		return err
	}
	return c.SetWriteDeadline(t)
}

func (c *bufferedConn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	return c.Conn.SetReadDeadline(t)
}

// SetWriteDeadline is not passed on: it bounds the caller's Write, and the buffer takes that at once.
func (c *bufferedConn) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	c.writeDeadline = t
	return nil
}

func (c *bufferedConn) notify() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// flush writes the buffer out until the connection is closed or broken. It owns closing the wrapped connection.
func (c *bufferedConn) flush() {
	defer c.Conn.Close()
	for range c.wake {
		chunk, last := c.take()
		if len(chunk) > 0 {
			if _, err := c.Conn.Write(chunk); err != nil {
				c.fail(err)
				return
			}
		}
		if last {
			return
		}
	}
}

// take returns what is to be written, and whether nothing can follow.
func (c *bufferedConn) take() (chunk []byte, last bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	chunk, c.unsent = c.unsent, nil
	return chunk, c.closed
}

func (c *bufferedConn) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		c.err = err
	}
	c.unsent = nil
}
