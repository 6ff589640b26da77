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
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	linger     = time.Second // how long a connection outlives its last listener
	firstPause = 50 * time.Millisecond
	maxPause   = 2 * time.Second
	denialTime = time.Minute
	pingEvery  = 10 * time.Second // a connection that does not answer by the next ping is given up
)

// Hub listens for its callers. It is safe for concurrent use.
type Hub struct {
	rdb redis.UniversalClient

	mu       sync.Mutex // guards all below, and all lines, connections and channels
	lines    map[node]*line
	channels map[string]*channel
	plain    bool              // the server has no sharded pub/sub
	refused  error             // the server does not let us listen: nothing more is tried
	denied   map[string]denial // the same of single channels, for a while
	running  int               // lines that have not ended
	idle     chan struct{}     // closed when running becomes 0; nil while nobody waits for that
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

// denial is the server's no to one channel.
type denial struct {
	err   error
	until time.Time
}

// deny remembers a denial, and forgets those that are over.
func (h *Hub) deny(name string, err error) {
	now := time.Now()
	for other, d := range h.denied {
		if !now.Before(d.until) {
			delete(h.denied, other)
		}
	}
	if h.denied == nil {
		h.denied = map[string]denial{}
	}
	h.denied[name] = denial{err, now.Add(denialTime)}
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
	if d, ok := h.denied[name]; ok && time.Now().Before(d.until) {
		return d.err
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
