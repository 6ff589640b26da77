package wake

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// line is the way to one primary: a connection, and another when that breaks.
type line struct {
	hub      *Hub
	node     node
	channels map[string]*channel
	conn     *conn // nil between two connections
	closed   bool
	empty    time.Time     // when the last channel was removed
	quit     chan struct{} // closed when closed is set
}

// conn is one connection of a line.
type conn struct {
	pubsub  *redis.PubSub
	sharded bool
	outbox  []ask // to be sent
	asked   []ask // sent and not answered; the server answers in order
	writing bool  // a goroutine empties the outbox
	up      bool  // it has been dialed
	silent  bool  // nothing was heard since the last ping
}

// ask is a command to be sent.
type ask struct {
	kind kind
	name string
}

type kind uint8

const (
	subscribe kind = iota
	unsubscribe
	ping
)

// noDial is what go-redis gets wherever it could dial of its own accord, as it does when a connection has broken: it
// would subscribe to everything in one command, and would hold a mutex meanwhile, which in a synctest bubble stops the
// clock. Reads and writes take only deadlines from it, and it has none.
var noDial = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// errAgain ends a connection that is to be replaced at once.
var errAgain = errors.New("to be subscribed again")

// run keeps a connection for as long as the line is wanted.
func (l *line) run() {
	defer l.hub.ended()
	pause, again := firstPause, false
	for {
		c := l.open()
		if c == nil {
			return
		}
		began := time.Now()
		err := l.dial(c)
		if err == nil {
			err = l.read(c)
		}
		if !l.broken(c, err) {
			return
		}
		if time.Since(began) > maxPause {
			pause = firstPause
		}
		if err != errAgain || again {
			select {
			case <-time.After(pause/2 + rand.N(pause/2)):
			case <-l.quit:
			}
			pause = min(2*pause, maxPause)
		}
		again = err == errAgain // once without a pause
		l.rehome()
	}
}

func (l *line) open() *conn {
	h := l.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(l.channels) == 0 {
		l.close()
	}
	if l.closed {
		return nil
	}
	c := &conn{pubsub: l.node.Subscribe(context.Background()), sharded: !h.plain, writing: true}
	l.conn = c
	for name := range l.channels {
		l.send(ask{subscribe, name})
	}
	return c
}

// dial opens the connection with its first command. Nobody else touches it before.
func (l *line) dial(c *conn) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-l.quit:
			cancel()
		case <-stop:
		}
	}()
	if err := l.write(ctx, c); err != nil {
		return err
	}
	l.hub.mu.Lock()
	defer l.hub.mu.Unlock()
	if l.closed {
		return errClosed
	}
	c.up = true
	time.AfterFunc(pingEvery, func() { l.ping(c) })
	return nil
}

var errClosed = errors.New("no longer wanted")

// broken accounts for the end of a connection. It tells whether another is wanted.
func (l *line) broken(c *conn, err error) bool {
	_ = c.pubsub.Close()
	h := l.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	l.conn = nil
	for _, ch := range l.channels {
		ch.live = false
		if err != errAgain {
			ch.fail(err)
		}
	}
	return !l.closed
}

// rehome moves channels whose slots are elsewhere by now.
func (l *line) rehome() {
	h := l.hub
	cluster, ok := h.rdb.(interface{ ReloadState(context.Context) })
	if !ok {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), maxPause)
	defer cancel()
	cluster.ReloadState(ctx)
	h.mu.Lock()
	names := make([]string, 0, len(l.channels))
	for name := range l.channels {
		names = append(names, name)
	}
	h.mu.Unlock()
	for _, name := range names {
		n, err := h.home(ctx, name)
		if err != nil || n == l.node {
			continue
		}
		h.mu.Lock()
		if ch := l.channels[name]; ch != nil {
			l.remove(ch)
			h.put(n, ch)
		}
		h.mu.Unlock()
	}
}

// remove takes ch out of the line, which ends soon if it was the last.
func (l *line) remove(ch *channel) {
	delete(l.channels, ch.name)
	if len(l.channels) > 0 {
		return
	}
	empty := time.Now()
	l.empty = empty
	time.AfterFunc(linger, func() {
		l.hub.mu.Lock()
		defer l.hub.mu.Unlock()
		if len(l.channels) == 0 && l.empty.Equal(empty) {
			l.close()
		}
	})
}

// close ends the line.
func (l *line) close() {
	if l.closed {
		return
	}
	l.closed = true
	close(l.quit)
	delete(l.hub.lines, l.node)
	if l.conn != nil && l.conn.up {
		go l.conn.pubsub.Close()
	}
}

// send has a command sent, if there is a connection: another one begins with all that is wanted.
func (l *line) send(a ask) {
	c := l.conn
	if c == nil {
		return
	}
	c.outbox = append(c.outbox, a)
	if !c.writing {
		c.writing = true
		go func() {
			if l.write(noDial, c) != nil {
				_ = c.pubsub.Close() // which tells the reader
			}
		}()
	}
}

// write empties the outbox of c. Only the first of its commands may dial.
func (l *line) write(ctx context.Context, c *conn) error {
	for {
		l.hub.mu.Lock()
		if len(c.outbox) == 0 {
			c.writing = false
			l.hub.mu.Unlock()
			return nil
		}
		a := c.outbox[0]
		c.outbox = c.outbox[1:]
		if a.kind != ping {
			c.asked = append(c.asked, a)
		}
		l.hub.mu.Unlock()
		if err := c.send(ctx, a); err != nil {
			return err
		}
		ctx = noDial
	}
}

func (c *conn) send(ctx context.Context, a ask) error {
	switch {
	case a.kind == ping:
		return c.pubsub.Ping(ctx)
	case a.kind == subscribe && c.sharded:
		return c.pubsub.SSubscribe(ctx, a.name)
	case a.kind == subscribe:
		return c.pubsub.Subscribe(ctx, a.name)
	case c.sharded:
		return c.pubsub.SUnsubscribe(ctx, a.name)
	default:
		return c.pubsub.Unsubscribe(ctx, a.name)
	}
}

// ping sees whether c is alive, if it is the line's connection still.
func (l *line) ping(c *conn) {
	l.hub.mu.Lock()
	defer l.hub.mu.Unlock()
	switch {
	case l.conn != c || l.closed:
	case c.silent:
		go c.pubsub.Close()
	default:
		c.silent = true
		l.send(ask{kind: ping})
		time.AfterFunc(pingEvery, func() { l.ping(c) })
	}
}

// read handles what comes through c until that breaks.
func (l *line) read(c *conn) error {
	for {
		msg, err := c.receive()
		l.hub.mu.Lock()
		c.silent = false
		if err != nil {
			err = l.refuse(c, err)
		} else {
			err = l.heard(c, msg)
		}
		l.hub.mu.Unlock()
		if err != nil {
			return err
		}
	}
}

// receive returns the next message. go-redis panics on a reply that no pub/sub command has.
func (c *conn) receive() (msg any, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("unexpected message: %v", r)
		}
	}()
	return c.pubsub.Receive(noDial)
}

func (l *line) heard(c *conn, msg any) error {
	switch m := msg.(type) {
	case *redis.Message:
		if ch := l.channels[m.Channel]; ch != nil {
			ch.ring(m.Payload)
		}
	case *redis.Subscription:
		a := ask{subscribe, m.Channel}
		if strings.HasSuffix(m.Kind, "unsubscribe") {
			a.kind = unsubscribe
		}
		if len(c.asked) == 0 || c.asked[0] != a {
			return errAgain // nobody has asked for it: the server says so because the slot has moved
		}
		c.asked = c.asked[1:]
		if ch := l.channels[m.Channel]; ch != nil && a.kind == subscribe && !c.asks(m.Channel) {
			ch.live = true
			ch.ring("")
		}
	}
	return nil
}

// asks tells whether a command for the channel is under way.
func (c *conn) asks(name string) bool {
	about := func(a ask) bool { return a.name == name }
	return slices.ContainsFunc(c.asked, about) || slices.ContainsFunc(c.outbox, about)
}

// refuse handles an error. It returns nil if the connection can be used further.
func (l *line) refuse(c *conn, err error) error {
	var reply redis.Error
	if !errors.As(err, &reply) {
		return err
	}
	text := strings.ToLower(reply.Error())
	unknown := strings.Contains(text, "unknown command") || strings.Contains(text, "unsupported")
	switch {
	case unknown && c.sharded:
		l.hub.plain = true
		return errAgain
	case strings.HasPrefix(text, "noperm") && strings.Contains(text, "'ping'"):
		return nil
	case len(c.asked) > 0 && (unknown || strings.HasPrefix(text, "noperm")):
		no, name := refusal{reply}, c.asked[0].name
		c.asked = c.asked[1:]
		if strings.Contains(text, "channel") {
			l.hub.deny(name, no)
		} else {
			l.hub.refused = no
		}
		if ch := l.channels[name]; ch != nil {
			ch.fail(no)
		}
		return nil
	default:
		return err
	}
}

// refusal is the server's no, which does not change by asking again.
type refusal struct{ error }

// Unwrap returns the server's reply and errors.ErrUnsupported.
func (r refusal) Unwrap() []error { return []error{r.error, errors.ErrUnsupported} }
