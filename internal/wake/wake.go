// Package wake hears what is published on channels of Redis. A Hub has one connection to each primary that it listens
// to, opened with the first listener and closed soon after the last; it subscribes again by itself when a connection
// breaks, a server restarts or a slot moves.
//
// Sharded pub/sub (Redis 7) is used where the server knows it, whatever the client's type is, so that clients of both
// types hear each other. In a cluster go-redis would subscribe again to all sharded channels of a connection in one
// command, which fails for channels of several slots; so a broken connection is given up and each channel is asked for
// on its own, where its slot is then.
package wake

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	linger     = time.Second // how long a connection outlives its last listener
	firstPause = 50 * time.Millisecond
	maxPause   = 2 * time.Second
	pingEvery  = 10 * time.Second // a connection that does not answer by the next ping is given up
)

// Hub listens for its callers. It is safe for concurrent use.
type Hub struct {
	rdb redis.UniversalClient

	mu       sync.Mutex // guards all below, and all lines, connections and channels
	lines    map[node]*line
	channels map[string]*channel
	plain    bool          // the server has no sharded pub/sub
	refused  error         // the server does not let us listen: nothing more is tried
	running  int           // lines that have not ended
	idle     chan struct{} // closed when running becomes 0; nil while nobody waits for that
}

// node is the client of one primary, or of a server that is the only one.
type node interface {
	Subscribe(ctx context.Context, channels ...string) *redis.PubSub
}

// channel is one that is listened to.
type channel struct {
	name      string
	line      *line
	live      bool // the server has confirmed the subscription
	listeners map[*listener]struct{}
}

type listener struct {
	wake    func(payload string)
	first   chan error // gets nil when the subscription is confirmed for the first time, or why it is not
	settled bool       // first has got it
}

// New returns a Hub on rdb. It does no I/O.
func New(rdb redis.UniversalClient) *Hub {
	return &Hub{rdb: rdb, lines: map[node]*line{}, channels: map[string]*channel{}}
}

// Listen returns when the subscription is confirmed: from then on wake is called for each message, and with "" whenever
// messages may have been missed. wake must not block. Listen fails when ctx ends before, or when the server can't be
// reached or refuses; it then matches errors.ErrUnsupported if there is no use in asking again. stop ends listening.
func (h *Hub) Listen(ctx context.Context, name string, wake func(payload string)) (stop func(), err error) {
	n, err := h.home(ctx, name)
	if err != nil {
		return nil, err
	}
	e := &listener{wake: wake, first: make(chan error, 1)}
	if err := h.join(n, name, e); err != nil {
		return nil, err
	}
	select {
	case err = <-e.first:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		h.leave(name, e)
		return nil, err
	}
	return sync.OnceFunc(func() { h.leave(name, e) }), nil
}

// home returns the primary of a channel, as far as the client knows.
func (h *Hub) home(ctx context.Context, name string) (node, error) {
	cluster, ok := h.rdb.(interface {
		MasterForKey(context.Context, string) (*redis.Client, error)
	})
	if !ok {
		return h.rdb, nil
	}
	return cluster.MasterForKey(ctx, name)
}

func (h *Hub) join(n node, name string, e *listener) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.refused != nil {
		return h.refused
	}
	ch := h.channels[name]
	if ch == nil {
		ch = &channel{name: name, listeners: map[*listener]struct{}{}}
		h.channels[name] = ch
		h.put(n, ch)
	} else if ch.live {
		e.settle(nil)
	}
	ch.listeners[e] = struct{}{}
	return nil
}

// put makes ch one of the line to n.
func (h *Hub) put(n node, ch *channel) {
	l := h.lines[n]
	if l == nil {
		l = &line{hub: h, node: n, channels: map[string]*channel{}, quit: make(chan struct{})}
		h.lines[n] = l
		h.running++
		go l.run()
	}
	ch.line = l
	l.channels[ch.name] = ch
	l.send(ask{subscribe, ch.name})
}

func (h *Hub) leave(name string, e *listener) {
	h.mu.Lock()
	defer h.mu.Unlock()
	ch := h.channels[name]
	if ch == nil {
		return
	}
	delete(ch.listeners, e)
	if len(ch.listeners) > 0 {
		return
	}
	delete(h.channels, name)
	ch.line.send(ask{unsubscribe, name})
	ch.line.remove(ch)
}

// Wait returns nil when no connection is left, or ctx's error. It does not wait for the time that idle ones linger.
func (h *Hub) Wait(ctx context.Context) error {
	for {
		h.mu.Lock()
		for _, l := range h.lines {
			if len(l.channels) == 0 {
				l.close()
			}
		}
		if h.running == 0 {
			h.mu.Unlock()
			return nil
		}
		if h.idle == nil {
			h.idle = make(chan struct{})
		}
		idle := h.idle
		h.mu.Unlock()
		select {
		case <-idle:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (h *Hub) ended() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.running--
	if h.running == 0 && h.idle != nil {
		close(h.idle)
		h.idle = nil
	}
}

func (e *listener) settle(err error) {
	if !e.settled {
		e.settled = true
		e.first <- err
	}
}

// ring wakes who listens to ch already, and tells the others that they do from now on.
func (ch *channel) ring(payload string) {
	for e := range ch.listeners {
		if e.settled {
			e.wake(payload)
		}
		e.settle(nil)
	}
}

// fail tells those whose subscription is not confirmed yet that it won't be.
func (ch *channel) fail(err error) {
	for e := range ch.listeners {
		e.settle(err)
	}
}

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
	pause := firstPause
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
		if err != errAgain {
			select {
			case <-time.After(pause/2 + rand.N(pause/2)):
			case <-l.quit:
			}
			pause = min(2*pause, maxPause)
		}
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
		msg, err := c.pubsub.Receive(noDial)
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
	case unknown, strings.HasPrefix(text, "noperm"):
		l.hub.refused = refusal{reply}
		if len(c.asked) > 0 {
			if ch := l.channels[c.asked[0].name]; ch != nil {
				ch.fail(l.hub.refused)
			}
			c.asked = c.asked[1:]
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
