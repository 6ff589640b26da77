package redistest

import (
	"sync"
	"testing"
	"time"
)

// Action is what a [Rule] does to a command. The zero value lets it pass.
type Action struct {
	fate  fate
	reply string        // for answered
	after time.Duration // for the two delays
}

type fate int

const (
	watched fate = iota
	requestDelayed
	requestHeld
	replyDelayed
	replyHeld
	replyDropped
	replySwallowed
	answered
	refused
)

// Watch only counts. A command that it matches is still offered to later rules.
func Watch() Action { return Action{fate: watched} }

// DropReply lets the server run the command, then closes the connection instead of passing the reply on.
func DropReply() Action { return Action{fate: replyDropped} }

// SwallowReply lets the server run the command, but neither its reply nor anything else comes back on that connection
// from then on. It stays open, half dead: what the client sends still arrives.
func SwallowReply() Action { return Action{fate: replySwallowed} }

// DelayReply lets the server run the command at once and brings the reply, and what follows it on that connection, d later.
func DelayReply(d time.Duration) Action { return Action{fate: replyDelayed, after: d} }

// HoldReply is DelayReply until [Rule.Release].
func HoldReply() Action { return Action{fate: replyHeld} }

// DelayRequest lets the command, and what follows it on that connection, reach the server d later: also if the client
// has closed the connection by then, as a packet in the network would.
func DelayRequest(d time.Duration) Action { return Action{fate: requestDelayed, after: d} }

// HoldRequest is DelayRequest until [Rule.Release].
func HoldRequest() Action { return Action{fate: requestHeld} }

// Refuse closes the connection instead of passing the command on. Commands before it are answered first.
func Refuse() Action { return Action{fate: refused} }

// ReplyError answers with an error, such as "READONLY You can't write against a read only replica.", instead of passing
// the command on.
func ReplyError(msg string) Action { return Action{fate: answered, reply: "-" + msg + "\r\n"} }

// Rule applies an action to the commands that match it. Without further calls that is all of them.
type Rule struct {
	match  Match
	action Action

	mu      sync.Mutex // guards the fields below
	skip    int
	left    int // negative: no limit
	hits    int
	reached map[int]chan struct{} // by number of hits

	released chan struct{}
	release  sync.Once
}

func newRule(match Match, action Action) *Rule {
	return &Rule{
		match: match, action: action, left: -1,
		reached:  make(map[int]chan struct{}),
		released: make(chan struct{}),
	}
}

// Times limits the rule to n commands. The rules after it apply to the others.
func (r *Rule) Times(n int) *Rule {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.left = n
	return r
}

// Skip lets the first n matching commands pass.
func (r *Rule) Skip(n int) *Rule {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.skip = n
	return r
}

// Off ends the rule for commands to come, and releases what it holds.
func (r *Rule) Off() {
	r.Times(0)
	r.Release()
}

// Release lets everything that the rule holds go on, now and in the future.
func (r *Rule) Release() {
	r.release.Do(func() { close(r.released) })
}

// Hits returns to how many commands the rule has applied. A rule about replies counts a command when the server has
// answered it, any other when the proxy has it.
func (r *Rule) Hits() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.hits
}

// Hit returns a channel that is closed at the n-th hit.
func (r *Rule) Hit(n int) <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	ch, ok := r.reached[n]
	if !ok {
		ch = make(chan struct{})
		r.reached[n] = ch
		if r.hits >= n {
			close(ch)
		}
	}
	return ch
}

// waitLimit bounds waiting for things that should be near. It is virtual in a bubble.
const waitLimit = 30 * time.Second

// Wait blocks until the n-th hit. It fails the test after 30 seconds: to wait for longer, in virtual time, use [Rule.Hit].
func (r *Rule) Wait(tb testing.TB, n int) {
	tb.Helper()
	timer := time.NewTimer(waitLimit)
	defer timer.Stop()
	select {
	case <-r.Hit(n):
	case <-timer.C:
		tb.Fatalf("redistest: a rule waited for %d hits and has %d after %v", n, r.Hits(), waitLimit)
	}
}

// takes reports whether the rule applies to a command, and uses up one of its times if so.
func (r *Rule) takes(args []string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.left == 0 || !r.match(args) {
		return false
	}
	if r.skip > 0 {
		r.skip--
		return false
	}
	if r.left > 0 {
		r.left--
	}
	return true
}

func (r *Rule) hit() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hits++
	if ch, ok := r.reached[r.hits]; ok {
		close(ch)
	}
}

// aboutReply reports whether the rule waits for the server's answer.
func (r *Rule) aboutReply() bool {
	switch r.action.fate {
	case replyDelayed, replyHeld, replyDropped, replySwallowed:
		return true
	}
	return false
}
