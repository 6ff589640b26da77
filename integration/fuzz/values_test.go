package fuzz_test

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// value is a reply, as it is sent and as it is to be understood.
type value struct {
	text   string
	kind   byte // the first of the text; 0: not a value, or not a whole one, or none
	str    string
	list   []value
	delay  time.Duration
	hangUp bool // the connection is closed after it
}

// source makes replies of bytes. When they are used up every reply is an error that ends what goes on.
type source struct{ data []byte }

func (s *source) byte() byte {
	if len(s.data) == 0 {
		return 0
	}
	b := s.data[0]
	s.data = s.data[1:]
	return b
}

// take returns the next few bytes, as many as the next says, and less if there are no more.
func (s *source) take() string {
	n := min(int(s.byte()%24), len(s.data))
	b := s.data[:n]
	s.data = s.data[n:]
	return string(b)
}

// line is take without what would end a line.
func (s *source) line() string {
	return strings.NewReplacer("\r", ".", "\n", ".").Replace(s.take())
}

var errorsOfServers = []string{
	"NOSCRIPT No matching script. Please use EVAL.", "READONLY You can't write against a read only replica.",
	"BUSY Redis is busy running a script.", "LOADING Redis is loading the dataset in memory",
	"WRONGTYPE Operation against a key holding the wrong kind of value", "NOAUTH Authentication required.",
	"NOPERM this user has no permissions to run the 'evalsha' command", "OOM command not allowed when used memory > 'maxmemory'.",
	"MOVED 1 127.0.0.1:1", "ASK 1 127.0.0.1:1", "CLUSTERDOWN The cluster is down", "TRYAGAIN Multiple keys request during rehashing",
	"MASTERDOWN Link with MASTER is down", "NOREPLICAS Not enough good replicas to write.", "ERR max number of clients reached",
	"ERR unknown command 'ssubscribe'", "ERR Error running script: -WRONGTYPE Operation", "MISCONF Errors writing to the AOF file", "ERR", "",
}

// kinds of replies, by what selects them. What a scenario needs to go on comes first, and often.
const (
	ok = iota
	number
	fence
	owned
	another
	null
	failed
	nothing // no connection any more
	silence
	late
	simple
	bulk
	wide
	nullArray
	null3
	array
	set
	dict
	push
	attribute
	double
	boolean
	big
	verbatim
	bulkError
	garbage
	half
	replyKinds
)

// next returns the next reply to a command.
func (s *source) next() value {
	if len(s.data) == 0 {
		return scalar('-', "ERR nothing more to say")
	}
	switch kind := s.byte() % replyKinds; kind {
	case nothing:
		return value{hangUp: true}
	case silence:
		return value{}
	case late:
		d := time.Duration(s.byte()) * 10 * time.Millisecond
		v := s.next()
		v.delay += d
		return v
	case garbage:
		return value{text: s.take(), hangUp: true}
	case half:
		v := s.value(s.byte(), 3)
		return value{text: v.text[:len(v.text)/2], hangUp: true}
	default:
		return s.value(kind, 3)
	}
}

// value makes one value that is whole. Lengths are honest: go-redis allocates what it is told without a limit.
func (s *source) value(kind byte, depth int) value {
	if depth == 0 {
		kind = kind % array
	}
	switch kind % replyKinds {
	case ok:
		return scalar('+', "OK")
	case number:
		return scalar(':', strconv.Itoa(int(int8(s.byte()))))
	case fence:
		return sized('$', strconv.Itoa(int(int8(s.byte()))))
	case owned:
		return list('*', sized('$', strconv.Itoa(int(int8(s.byte())))))
	case another:
		return list('*', scalar(':', strconv.Itoa(int(int8(s.byte())))), sized('$', s.take()))
	case null:
		return value{text: "$-1\r\n", kind: '_'}
	case nullArray:
		return value{text: "*-1\r\n", kind: '_'}
	case null3:
		return value{text: "_\r\n", kind: '_'}
	case failed:
		return scalar('-', errorsOfServers[int(s.byte())%len(errorsOfServers)])
	case simple:
		return scalar('+', s.line())
	case bulk:
		return sized('$', s.take())
	case wide:
		return scalar(':', strconv.FormatInt(int64(s.byte())<<56|int64(s.byte()), 10))
	case array:
		return list('*', s.values(s.byte()%4, depth-1)...)
	case set:
		return list('~', s.values(s.byte()%4, depth-1)...)
	case push: // it begins with its kind: after another one go-redis is out of step with the server
		return list('>', append([]value{sized('$', s.take())}, s.values(s.byte()%4, depth-1)...)...)
	case dict:
		items := s.values(s.byte()%3*2, depth-1)
		return value{text: fmt.Sprintf("%%%d\r\n", len(items)/2) + texts(items), kind: '%', list: items}
	case attribute: // it is to be ignored
		items := s.values(s.byte()%3*2, depth-1)
		v := s.value(s.byte(), depth-1)
		v.text = fmt.Sprintf("|%d\r\n", len(items)/2) + texts(items) + v.text
		return v
	case double:
		return scalar(',', []string{"1", "-1.5e300", "inf", "-inf", "nan", "0", s.line()}[s.byte()%7])
	case boolean:
		return scalar('#', []string{"t", "f", s.line()}[s.byte()%3])
	case big:
		return scalar('(', []string{"1", "-3492890328409238509324850943850943825024385", s.line()}[s.byte()%3])
	case verbatim:
		return sized('=', "txt:"+s.take())
	case bulkError:
		return sized('!', errorsOfServers[int(s.byte())%len(errorsOfServers)])
	default:
		return scalar('+', "OK")
	}
}

func (s *source) values(n byte, depth int) []value {
	items := make([]value, n)
	for i := range items {
		items[i] = s.value(s.byte(), depth)
	}
	return items
}

func texts(items []value) string {
	text := ""
	for _, v := range items {
		text += v.text
	}
	return text
}

func scalar(kind byte, s string) value {
	return value{text: string(kind) + s + "\r\n", kind: kind, str: s}
}

func sized(kind byte, s string) value {
	return value{text: fmt.Sprintf("%c%d\r\n%s\r\n", kind, len(s), s), kind: kind, str: s}
}

func list(kind byte, items ...value) value {
	return value{text: fmt.Sprintf("%c%d\r\n", kind, len(items)) + texts(items), kind: kind, list: items}
}

// Clients tell some kinds apart that mean the same: strings are sent in three ways, lists in three as well.

// integer returns the number that a value is.
func (v value) integer() (int64, bool) {
	n, err := strconv.ParseInt(v.str, 10, 64)
	return n, err == nil && v.kind == ':'
}

// word returns the text that a value is.
func (v value) word() (string, bool) {
	switch v.kind {
	case '+', '$':
		return v.str, true
	case '=':
		return strings.TrimPrefix(v.str, "txt:"), true
	}
	return "", false
}

// decimal returns the number that the text says which a value is.
func (v value) decimal() (int64, bool) {
	word, is := v.word()
	n, err := strconv.ParseInt(word, 10, 64)
	return n, is && err == nil
}

// items returns the values of a list.
func (v value) items() (items []value, is bool) {
	return v.list, v.kind == '*' || v.kind == '~' || v.kind == '>'
}

func (v value) failed() bool { return v.kind == '-' || v.kind == '!' }

// The rest says what a reply means, by the documentation of the scripts. What means nothing tells nothing.

// grants tells whether the lock is the sender's from now on, and its fences up to which number.
func (r received) grants() (last int64, granted bool) {
	switch r.does {
	case "set":
		word, is := r.reply.word()
		return 0, is && word == "OK"
	case "acquire":
		v := r.reply
		if items, is := v.items(); is && len(items) == 1 {
			v = items[0]
		}
		n, is := v.decimal()
		return n, is && n >= 0
	}
	return 0, false
}

// renews tells whether the lease lasts longer, and its fences up to which number are reserved.
func (r received) renews() (last int64, renewed bool) {
	switch r.does {
	case "renew":
		n, is := r.reply.integer()
		return 0, is && n == 1
	case "prolong":
		items, is := r.reply.items()
		if !is || len(items) != 2 {
			return 0, false
		}
		_, first := items[0].integer()
		last, second := items[1].decimal()
		return last, first && second && last >= 0
	}
	return 0, false
}

// ends tells whether the command is one that gives the lock up.
func (r received) ends() bool { return r.does == "release" || r.does == "hold" }

func (r received) released() bool {
	n, number := r.reply.integer()
	items, list := r.reply.items()
	return r.ends() && (number && n >= 1 || list && len(items) <= 1)
}

// held tells whether the reply says that another has the lock.
func (r received) held() bool {
	switch r.does {
	case "set":
		return r.reply.kind == '_'
	case "acquire":
		items, is := r.reply.items()
		if !is || len(items) != 2 {
			return false
		}
		_, first := items[0].integer()
		_, second := items[1].word()
		return first && second
	}
	return false
}

// gone tells whether the reply says that the key is not the sender's.
func (r received) gone() bool {
	if r.does != "renew" && r.does != "prolong" && !r.ends() {
		return false
	}
	n, number := r.reply.integer()
	return number && n == 0 || r.reply.failed() && strings.Contains(r.reply.str, "WRONGTYPE")
}

// unclear tells whether a command that gives the lock up may have done so without saying it.
func (r received) unclear() bool {
	return r.ends() && !r.released() && !r.gone() && !r.reply.failed()
}
