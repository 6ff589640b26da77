package redistest

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
)

// Proxy stands between clients and a server, and fails where it is told to. Rules, made with [Proxy.On], apply to single
// commands. The modes Silence, RefuseAll and Latency apply to everything, also to what is already on its way.
//
// It counts frames of the protocol and not bytes or packets, so that a rule means the same in a pipeline. Delays are
// those of package time, and thus virtual inside a synctest bubble. All of its methods may be called from any goroutine.
//
// CLIENT REPLY, MONITOR and the replication commands, which break the pattern of a reply for each command, are not
// understood.
type Proxy struct {
	upstream func(context.Context) (net.Conn, error)
	ctx      context.Context // ends with the proxy
	stop     context.CancelFunc
	running  sync.WaitGroup

	mu        sync.Mutex // guards the fields below; nothing blocks while holding it
	rules     []*Rule
	commands  []Command
	links     map[*link]struct{}
	listeners []net.Listener
	silent    chan struct{} // closed by Heal; nil unless silent
	refusing  bool
	roundTrip time.Duration
}

// Command is a command that a proxy has seen.
type Command struct {
	Args []string // with its name, as it was sent
	At   time.Time
}

// NewProxy returns a proxy in front of the server that upstream connects to, once for each connection of a client.
func NewProxy(tb testing.TB, upstream func(ctx context.Context) (net.Conn, error)) *Proxy {
	tb.Helper()
	ctx, stop := context.WithCancel(context.Background())
	p := &Proxy{upstream: upstream, ctx: ctx, stop: stop, links: make(map[*link]struct{})}
	tb.Cleanup(p.Close)
	return p
}

// ProxyTo returns a proxy in front of a server at a TCP address.
func ProxyTo(tb testing.TB, addr string) *Proxy {
	tb.Helper()
	return NewProxy(tb, func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", addr)
	})
}

// ProxyMini returns a proxy in front of m.
func ProxyMini(tb testing.TB, m *miniredis.Miniredis) *Proxy {
	tb.Helper()
	return NewProxy(tb, func(context.Context) (net.Conn, error) { return m.Dial() })
}

// Client returns a client that connects through the proxy. The caveat of [MiniClient] about pools applies in a bubble.
func (p *Proxy) Client(tb testing.TB, opts ...func(*redis.Options)) *redis.Client {
	tb.Helper()
	return newClient(tb, noAddr, p.Dial, opts)
}

// Dial connects through the proxy, whatever the address. It is a dialer for [redis.Options].
//
// In one respect the connection differs from a socket: a client cannot look, before it uses a pooled connection,
// whether that was closed. It learns it from the first command, where on a socket it would silently connect again.
// Clients that come by way of [Proxy.Listen] behave as usual.
func (p *Proxy) Dial(ctx context.Context, network, _ string) (net.Conn, error) {
	if err := p.awaitDial(ctx); err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Err: err}
	}
	server, err := p.upstream(ctx)
	if err != nil {
		return nil, err
	}
	here, there := net.Pipe()
	if !p.connect(here, server) {
		return nil, &net.OpError{Op: "dial", Net: network, Err: syscall.ECONNREFUSED}
	}
	return &pipeEnd{Conn: there}, nil
}

// awaitDial returns nil once connections may be made.
func (p *Proxy) awaitDial(ctx context.Context) error {
	gate := p.gate()
	if ctx.Err() != nil || gate == nil {
		return ctx.Err() // nil: connect finds out about RefuseAll
	}
	select {
	case <-gate:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-p.ctx.Done():
		return syscall.ECONNREFUSED
	}
}

// Listen opens a TCP port for clients that cannot use Dial, such as child processes, and returns its address. There
// RefuseAll shows as a connection that is closed at once.
func (p *Proxy) Listen(tb testing.TB) string {
	tb.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal("redistest:", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.listeners = append(p.listeners, l)
	p.running.Go(func() { p.accept(l) })
	return l.Addr().String()
}

func (p *Proxy) accept(l net.Listener) {
	for {
		client, err := l.Accept()
		if err != nil {
			return
		}
		p.running.Go(func() {
			server, err := p.upstream(p.ctx)
			if err != nil {
				_ = client.Close()
				return
			}
			p.connect(client, server)
		})
	}
}

// connect reports whether it has linked two connections. It closes them otherwise.
func (p *Proxy) connect(client, server net.Conn) bool {
	l := newLink(p, client, server)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.refusing || p.ctx.Err() != nil {
		l.kill()
		return false
	}
	p.links[l] = struct{}{}
	p.running.Go(func() {
		l.run()
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.links, l)
	})
	return true
}

// On makes the action apply to the commands that match. Where several rules match, the one made first applies; where
// that is used up (see [Rule.Times]), the next.
func (p *Proxy) On(match Match, action Action) *Rule {
	r := newRule(match, action)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rules = append(p.rules, r)
	return r
}

// Silence lets nothing through, in either direction, until [Proxy.Heal]. Connections stay open and take what is written
// to them. New ones wait. What was sent meanwhile arrives afterwards, as TCP makes it: to lose it instead, call Cut
// before Heal.
func (p *Proxy) Silence() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.silent == nil {
		p.silent = make(chan struct{})
	}
}

// RefuseAll cuts all connections and refuses new ones, until [Proxy.Heal].
func (p *Proxy) RefuseAll() {
	p.mu.Lock()
	p.refusing = true
	p.mu.Unlock()
	p.Cut()
}

// Heal ends Silence and RefuseAll. Rules and Latency stay.
func (p *Proxy) Heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refusing = false
	if p.silent != nil {
		close(p.silent)
		p.silent = nil
	}
}

// Cut closes all connections on both sides, once. What is on its way is lost, also what a rule has delayed.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		l.kill()
	}
}

// Latency makes each round trip take d longer, half of it in each direction. Pipelined commands share it.
func (p *Proxy) Latency(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.roundTrip = d
}

// Commands returns all commands so far that clients have sent, in the order in which they came to the proxy. Those of
// the handshake are among them, and so are those that a rule keeps from the server.
func (p *Proxy) Commands() []Command {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.commands)
}

// Count returns how many of [Proxy.Commands] match.
func (p *Proxy) Count(match Match) int {
	n := 0
	for _, c := range p.Commands() {
		if match(c.Args) {
			n++
		}
	}
	return n
}

// command records a command and returns the rule that applies to it, if any.
func (p *Proxy) command(args []string) *Rule {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.commands = append(p.commands, Command{Args: args, At: time.Now()})
	for _, r := range p.rules {
		if !r.takes(args) {
			continue
		}
		if !r.aboutReply() {
			r.hit()
		}
		if r.action.fate != watched {
			return r
		}
	}
	return nil
}

func (p *Proxy) gate() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.silent
}

func (p *Proxy) latency() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.roundTrip
}

// Close ends the proxy and all connections, and forgets the commands. The end of the test does it too.
func (p *Proxy) Close() {
	p.mu.Lock()
	p.stop()
	p.commands = nil
	for _, l := range p.listeners {
		_ = l.Close()
	}
	p.mu.Unlock()
	p.Cut()
	p.running.Wait()
}

// pipeEnd is the client's end of a pipe, with the errors of a socket: clients tell them apart.
type pipeEnd struct {
	net.Conn
	mu   sync.Mutex // guards gone
	gone bool
}

func (c *pipeEnd) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	return n, c.translate("read", err)
}

func (c *pipeEnd) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	return n, c.translate("write", err)
}

func (c *pipeEnd) Close() error {
	c.mu.Lock()
	c.gone = true
	c.mu.Unlock()
	return c.Conn.Close()
}

func (c *pipeEnd) translate(op string, err error) error {
	if err == nil || err == io.EOF {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if errors.Is(err, io.ErrClosedPipe) {
		err = syscall.EPIPE
		if c.gone {
			err = net.ErrClosed
		}
	}
	return &net.OpError{Op: op, Net: "tcp", Err: err}
}
