package redistest

import (
	"bufio"
	"net"
	"slices"
	"strings"
	"sync"
	"time"
)

// link is one connection through a proxy. Four goroutines move it: one reads commands and one delivers them, one reads
// replies and one delivers those. The readers never wait for a delivery, so that neither side can block the other.
type link struct {
	proxy          *Proxy
	client, server net.Conn
	requests       *line
	replies        *line
	done           chan struct{} // closed by kill
	killed         sync.Once

	mu         sync.Mutex // guards the fields below
	pending    []*exchange
	subscribed bool
	muted      bool // nothing more reaches the client
	finished   bool // no command follows
}

// exchange is a command whose reply is outstanding.
type exchange struct {
	args  []string
	rule  *Rule // nil if none applies
	left  int   // frames that the reply still consists of
	begun bool
}

func newLink(p *Proxy, client, server net.Conn) *link {
	return &link{
		proxy: p, client: client, server: server,
		requests: newLine(p.gate),
		replies:  newLine(p.gate),
		done:     make(chan struct{}),
	}
}

// run returns when the connection has ended on both sides.
func (l *link) run() {
	defer l.kill()
	var wg sync.WaitGroup
	wg.Go(l.readRequests)
	wg.Go(l.readReplies)
	wg.Go(func() { l.requests.run(l.done) })
	wg.Go(func() { l.replies.run(l.done) })
	wg.Wait()
}

// kill ends the connection on both sides at once. What is on its way is lost.
func (l *link) kill() {
	l.killed.Do(func() {
		close(l.done)
		_ = l.client.Close()
		_ = l.server.Close()
	})
}

// readRequests sends the client's commands on their way, and after the last of them the end of the connection.
func (l *link) readRequests() {
	r := bufio.NewReader(l.client)
	for {
		args, raw, err := readCommand(r)
		if err != nil || !l.request(args, raw) {
			break
		}
	}
	l.requests.send(parcel{due: l.oneWay(), arrive: l.finish, last: true})
}

// request reports whether the connection takes further commands.
func (l *link) request(args []string, raw []byte) bool {
	if len(args) == 0 {
		return true // an empty line, which a server ignores
	}
	rule := l.proxy.command(args)
	x := &exchange{args: args, rule: rule, left: frames(args)}
	p := parcel{due: l.oneWay(), arrive: func() { l.pass(x, raw) }}
	if rule == nil {
		l.requests.send(p)
		return true
	}
	switch rule.action.fate {
	case requestDelayed:
		p.due = p.due.Add(rule.action.after)
	case requestHeld:
		p.hold = rule.released
	case answered, refused:
		p.arrive = func() { l.keep(x) }
	}
	l.requests.send(p)
	return rule.action.fate != refused
}

// pass hands a command to the server.
func (l *link) pass(x *exchange, raw []byte) {
	l.mu.Lock()
	l.pending = append(l.pending, x)
	l.subscribed = l.subscribed || isConfirmation(strings.ToLower(x.args[0]))
	l.mu.Unlock()
	_, _ = l.server.Write(raw) // readReplies notices a broken connection
}

// keep queues a command that the proxy answers by itself, behind the replies that come before.
func (l *link) keep(x *exchange) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pending = append(l.pending, x)
	l.answerLocked()
}

// answerLocked answers the commands that the proxy answers by itself and whose turn has come.
func (l *link) answerLocked() {
	for len(l.pending) > 0 && l.pending[0].answeredHere() {
		rule := l.pending[0].rule
		l.pending = l.pending[1:]
		if rule.action.fate == refused {
			l.hangUpLocked()
			continue
		}
		l.sendLocked(parcel{due: l.oneWay(), arrive: l.write([]byte(rule.action.reply))})
	}
}

func (x *exchange) answeredHere() bool {
	return x.rule != nil && (x.rule.action.fate == answered || x.rule.action.fate == refused)
}

// finish tells the server that no command follows. It has to run those that it got before it learns that its client is
// gone: a socket can say so by half closing. A pipe cannot, there the last reply has to be awaited.
func (l *link) finish() {
	if half, ok := l.server.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite()
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.finished = true
	l.closeIfIdleLocked()
}

func (l *link) closeIfIdleLocked() {
	if l.finished && len(l.pending) == 0 {
		_ = l.server.Close()
	}
}

// readReplies sends the server's replies on their way, and after the last of them the end of the connection.
func (l *link) readReplies() {
	r := bufio.NewReader(l.server)
	for {
		raw, err := readValue(r, nil)
		if err != nil {
			break
		}
		l.reply(raw)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.muted {
		l.replies.send(parcel{arrive: func() {}, last: true})
		return
	}
	l.replies.send(parcel{due: l.oneWay(), arrive: l.closeClient, last: true})
}

// reply sends a frame on its way to the client, as the rule for its command demands.
func (l *link) reply(raw []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := parcel{due: l.oneWay(), arrive: l.write(raw)}
	x := l.settleLocked(raw)
	if x != nil && x.rule != nil && x.rule.aboutReply() && !x.begun {
		l.bendLocked(x.rule, &p)
	}
	if x != nil {
		x.begun = true
	}
	l.sendLocked(p)
	l.answerLocked()
	l.closeIfIdleLocked()
}

// bendLocked does to a reply what a rule says. A reply that is not to arrive finds the connection muted.
func (l *link) bendLocked(rule *Rule, p *parcel) {
	rule.hit() // before the client can notice anything
	switch rule.action.fate {
	case replyDelayed:
		p.due = p.due.Add(rule.action.after)
	case replyHeld:
		p.hold = rule.released
	case replySwallowed:
		l.muted = true
	case replyDropped:
		l.hangUpLocked()
	}
}

// settleLocked returns the command that a frame answers, or nil if none: it is a message then.
func (l *link) settleLocked(raw []byte) *exchange {
	kind := ""
	if raw[0] == '>' || l.subscribed {
		kind = firstString(raw)
	}
	if raw[0] == '>' || isMessage(kind) || isConfirmation(kind) {
		return l.confirmLocked(kind)
	}
	if len(l.pending) == 0 {
		return nil
	}
	x := l.pending[0]
	l.pending = l.pending[1:]
	return x
}

// confirmLocked settles one of the frames that answer a SUBSCRIBE or its like, one for each channel.
func (l *link) confirmLocked(kind string) *exchange {
	if len(l.pending) == 0 || !isConfirmation(kind) || !strings.EqualFold(l.pending[0].args[0], kind) {
		return nil
	}
	x := l.pending[0]
	if x.left--; x.left == 0 {
		l.pending = l.pending[1:]
	}
	return x
}

// hangUpLocked closes the client's side once it has what is on its way. Commands that are on theirs still arrive.
func (l *link) hangUpLocked() {
	l.sendLocked(parcel{due: l.oneWay(), arrive: l.closeClient})
	l.muted = true
}

func (l *link) sendLocked(p parcel) {
	if !l.muted {
		l.replies.send(p)
	}
}

func (l *link) write(raw []byte) func() {
	return func() { _, _ = l.client.Write(raw) } // readRequests notices a broken connection
}

func (l *link) closeClient() { _ = l.client.Close() }

// oneWay returns when something that is sent now arrives.
func (l *link) oneWay() time.Time {
	return time.Now().Add(l.proxy.latency() / 2)
}

// frames returns how many frames answer a command.
func frames(args []string) int {
	if isConfirmation(strings.ToLower(args[0])) {
		return max(1, len(args)-1)
	}
	return 1
}

func isConfirmation(kind string) bool {
	return slices.Contains([]string{
		"subscribe", "psubscribe", "ssubscribe", "unsubscribe", "punsubscribe", "sunsubscribe",
	}, kind)
}

func isMessage(kind string) bool {
	return slices.Contains([]string{"message", "pmessage", "smessage"}, kind)
}
