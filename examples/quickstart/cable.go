package main

import (
	"net"
	"sync"
)

// cable is a line to Redis that can go dead, as when a network drops packets: connections stay, and nothing arrives.
type cable struct {
	listener      net.Listener
	network, addr string // where it leads to
	wg            sync.WaitGroup
	dead          sync.RWMutex // locked while nothing arrives

	mu     sync.Mutex // guards the fields below
	cut    bool
	closed bool
	conns  []net.Conn
}

func newCable(network, addr string) (*cable, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	c := &cable{listener: listener, network: network, addr: addr}
	c.wg.Go(c.accept)
	return c, nil
}

// Addr is the near end, for a client to connect to.
func (c *cable) Addr() string { return c.listener.Addr().String() }

// Cut makes the line go dead. What is sent arrives after Mend.
func (c *cable) Cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.cut {
		c.dead.Lock()
		c.cut = true
	}
}

// Mend ends Cut.
func (c *cable) Mend() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cut {
		c.dead.Unlock()
		c.cut = false
	}
}

// Close ends all connections, and returns when nothing runs any more.
func (c *cable) Close() {
	c.Mend()
	c.listener.Close()
	c.mu.Lock()
	c.closed = true
	for _, conn := range c.conns {
		conn.Close()
	}
	c.mu.Unlock()
	c.wg.Wait()
}

func (c *cable) accept() {
	for {
		near, err := c.listener.Accept()
		if err != nil {
			return
		}
		far, err := net.Dial(c.network, c.addr)
		if err != nil {
			near.Close()
			continue
		}
		c.mu.Lock()
		c.conns = append(c.conns, near, far)
		if c.closed {
			near.Close()
			far.Close()
		}
		c.mu.Unlock()
		c.wg.Go(func() { c.carry(near, far) })
		c.wg.Go(func() { c.carry(far, near) })
	}
}

// carry copies from one end to the other, until either is closed.
func (c *cable) carry(to, from net.Conn) {
	defer to.Close()
	defer from.Close()
	buf := make([]byte, 4096)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		c.dead.RLock()
		_, err = to.Write(buf[:n])
		c.dead.RUnlock()
		if err != nil {
			return
		}
	}
}
