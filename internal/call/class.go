package call

import (
	"errors"
	"net"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"
)

// Class says what an error tells about the command it belongs to.
type Class int

const (
	// Done: the server executed the command and answered.
	Done Class = iota
	// NotDone: the command had no effect; a later try may succeed.
	NotDone
	// Never: the command had no effect, and waiting will not change that.
	Never
	// Unknown: the command may have been executed, now or later.
	Unknown
)

// Abandoned is the error of a command whose caller left before an answer came.
type Abandoned struct {
	cause  error // matches ctx.Err(), unless the limit of a command was over
	unsent bool  // the caller left before anything was sent
}

func (e *Abandoned) Error() string { return e.cause.Error() }

// Unwrap returns why the caller left.
func (e *Abandoned) Unwrap() error { return e.cause }

// codes of replies that time does not heal.
var never = []string{"NOAUTH", "NOPERM", "WRONGPASS", "WRONGTYPE", "CROSSSLOT", "DENIED", "NOPROTO", "EXECABORT", "ERR"}

// codes of replies that tell of a state that may pass. There are others, and they are taken to pass too; these are
// looked for within an ERR, as servers before Redis 7 report errors inside a script.
var passing = []string{
	"READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS", "OOM", "MISCONF", "BUSY", "NOSCRIPT",
}

// ClassOf tells the class of the error that a command ended with. An error reply of the server means that our
// commands had no effect: the scripts check and count before they set.
func ClassOf(err error) Class {
	switch {
	case err == nil, errors.Is(err, redis.Nil):
		return Done
	case errors.Is(err, redis.ErrClosed):
		return Never
	case errors.Is(err, redis.ErrPoolTimeout), errors.Is(err, redis.ErrPoolExhausted):
		return NotDone
	}
	var left *Abandoned
	if errors.As(err, &left) {
		if left.unsent {
			return ofUnsent(left.cause)
		}
		return Unknown
	}
	var reply redis.Error
	if errors.As(err, &reply) {
		return classOfReply(reply.Error())
	}
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" {
		return NotDone // no connection, so nothing was sent
	}
	if err != nil && strings.HasPrefix(err.Error(), "redis: can't marshal") {
		return Never // an argument that go-redis can't send
	}
	return Unknown
}

// ofUnsent is the class of a command that was certainly not sent. What refused it before, such as a wrong password, may
// refuse it for ever.
func ofUnsent(cause error) Class {
	if ClassOf(cause) == Never {
		return Never
	}
	return NotDone
}

func classOfReply(text string) Class {
	if strings.Contains(text, "max number of clients") || hasCode(text, passing) || !hasCode(text, never) {
		return NotDone
	}
	return Never
}

// HasCode tells whether err is a reply of the server with the given code, such as WRONGTYPE: in front, or inside an ERR.
func HasCode(err error, code string) bool {
	return err != nil && isReply(err, code)
}

func isReply(err error, code string) bool {
	var reply redis.Error
	return errors.As(err, &reply) && hasCode(reply.Error(), []string{code})
}

func hasCode(text string, codes []string) bool {
	words := strings.Fields(text)
	if len(words) > 0 && words[0] != "ERR" {
		words = words[:1]
	}
	return slices.ContainsFunc(words, func(word string) bool {
		return slices.Contains(codes, strings.TrimPrefix(word, "-")) // with the dash before Redis 7
	})
}

// WasAbandoned tells whether the caller left before the command ended, so that the command must not be read.
func WasAbandoned(err error) bool {
	var left *Abandoned
	return errors.As(err, &left)
}
