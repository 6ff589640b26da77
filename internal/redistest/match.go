package redistest

import (
	"crypto/sha1"
	"encoding/hex"
	"slices"
	"strings"
)

// Match picks the commands that a [Rule] applies to. args is the command with its name, as it was sent.
type Match func(args []string) bool

// Any matches every command but those of the handshake that clients open a connection with (HELLO, AUTH, SELECT,
// READONLY, CLIENT ...), so that a rule for the first command finds the first that the test itself sent. To fail a
// handshake name its command with [Cmd].
func Any() Match {
	return func(args []string) bool {
		return !slices.Contains([]string{"HELLO", "AUTH", "SELECT", "READONLY", "CLIENT"}, verb(args))
	}
}

// Cmd matches commands by name, in any case: Cmd("SET", "GET").
func Cmd(names ...string) Match {
	return func(args []string) bool {
		return slices.ContainsFunc(names, func(name string) bool { return strings.EqualFold(name, verb(args)) })
	}
}

// Script matches the runs of a Lua script, given as its text or its SHA1: EVALSHA of it, and EVAL of that text. A part of
// the text does too, for EVAL only.
func Script(script string) Match {
	sum := sha1.Sum([]byte(script))
	sha := hex.EncodeToString(sum[:])
	return func(args []string) bool {
		if len(args) < 2 {
			return false
		}
		switch verb(args) {
		case "EVALSHA", "EVALSHA_RO":
			return strings.EqualFold(args[1], sha) || strings.EqualFold(args[1], script)
		case "EVAL", "EVAL_RO":
			return strings.Contains(args[1], script)
		}
		return false
	}
}

// Arg matches commands with an argument equal to arg, a key for example.
func Arg(arg string) Match {
	return func(args []string) bool { return len(args) > 0 && slices.Contains(args[1:], arg) }
}

// All matches what each of ms matches.
func All(ms ...Match) Match {
	return func(args []string) bool {
		return !slices.ContainsFunc(ms, func(m Match) bool { return !m(args) })
	}
}

// Not matches what m does not.
func Not(m Match) Match {
	return func(args []string) bool { return !m(args) }
}

func verb(args []string) string {
	if len(args) == 0 {
		return ""
	}
	return strings.ToUpper(args[0])
}
