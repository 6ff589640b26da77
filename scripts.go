package lock

import (
	"context"
	"crypto/sha1" // what Redis names scripts by
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/seed-b640e7e9/lock/internal/call"
)

// Store keeps leases: it is to a Locker what a slog.Handler is to a Logger. Users call a Locker; a Store is written by
// those who bring another way of keeping leases, such as a quorum of servers. It is experimental until v1: structs may
// gain fields.
//
// Each call makes one attempt and ends when ctx does. Errors are told apart by errors.Is: ErrHeld, ErrLost, ErrUnknown
// (the attempt may have had its effect, or have it later); any other error means that it certainly had none. Permanent
// marks those that waiting can't heal. A Store must be safe for concurrent use.
type Store interface {
	// Acquire takes the key for the token, unless another token has it (ErrHeld). If the key has the token already, its
	// TTL is raised to the request's and the fence is the same as before.
	Acquire(ctx context.Context, r Request) (Reply, error)

	// Renew raises the TTLs of leases, never lowering one. It calls done exactly once for each request, maybe from
	// several goroutines and as soon as that request is decided, and returns after the last. ErrLost says that the key is
	// gone or another's.
	Renew(ctx context.Context, rs []Request, done func(i int, err error))

	// Release deletes the key if it has the token, or leaves it, of no more use to the token, for the request's Hold.
	// ErrLost says that the key is gone or another's.
	Release(ctx context.Context, r Request) error
}

// Key is where a name lives in Redis.
type Key struct {
	Lock  string // holds the token
	Fence string // holds the fence counter; empty without fencing
}

// FenceMode says how fences are counted.
type FenceMode uint8

const (
	FenceOff     FenceMode = iota // no fences
	FenceCounter                  // one more than the last
	FenceClock                    // the same, but at least the server's time in microseconds
)

// Request is what a Store is asked for. Each method uses the fields that it needs.
type Request struct {
	Key   Key
	Token string
	TTL   time.Duration // of Acquire and Renew; whole milliseconds
	Fence FenceMode     // of Acquire
	Again bool          // of Acquire: the token was sent before, or the key is known to be held
	Hold  time.Duration // of Release: how much longer the key stays, although nobody holds it
}

// Reply is what Acquire answers.
type Reply struct {
	Fence     Fence         // of a grant with fencing
	Own       bool          // of a grant: the key had the token already, from an earlier send
	Remaining time.Duration // of ErrHeld: when the key ends unless it is renewed; not positive if unknown
}

// Permanent marks err as one that waiting does not heal: a waiting Acquire gives up at once. A nil err stays nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return permanent{err}
}

type permanent struct{ error }

func (p permanent) Unwrap() error { return p.error }

func isPermanent(err error) bool {
	var p permanent
	return errors.As(err, &p)
}

// script is Lua text and the hash that it is called by, as arguments of commands.
type script struct{ text, sha any }

func newScript(text string) *script {
	sum := sha1.Sum([]byte(text))
	return &script{text: text, sha: hex.EncodeToString(sum[:])}
}

// acquireScript takes a lease.
//
//	KEYS   lock [, fence counter]
//	ARGV   token, TTL in ms [, "counter" or "clock"]
//	reply  held by another: its PTTL; granted: the fence, as a string; granted to the same token before: {fence}
//
// A repeat finds its own token and changes nothing but a TTL that is too short. The counter rises before the key is
// set: if it can't rise there is no lock, and a number that nobody got is only skipped. Fences travel as strings and
// are compared by length and then bytes, as Lua's numbers are exact up to 2^53 only.
var acquireScript = newScript(`
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then
  return redis.call('PTTL', KEYS[1])
end
if holder and redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
local fence = KEYS[2] and holder and redis.call('GET', KEYS[2])
if KEYS[2] and not fence then
  redis.call('INCR', KEYS[2])
  fence = redis.call('GET', KEYS[2])
  if ARGV[3] == 'clock' then
    local t = redis.call('TIME')
    local now = string.format('%.0f', t[1] * 1000000 + t[2])
    if #now > #fence or (#now == #fence and now > fence) then
      redis.call('SET', KEYS[2], now)
      fence = now
    end
  end
end
if holder then
  return {fence or '0'}
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return fence or '0'
`)

// notMine ends a script that found another value than the token, or none. A replica would have answered the GET too,
// although it may be behind; so the script tries a write that changes nothing, which a replica refuses: then READONLY
// is the answer, and nothing has been learnt.
const notMine = `
local probe
if value then
  probe = redis.pcall('SET', KEYS[1], '', 'PX', 1, 'NX')
else
  probe = redis.pcall('DEL', KEYS[1])
end
if type(probe) == 'table' and probe.err and string.find(probe.err, 'READONLY', 1, true) then
  return probe
end
return 0
`

// renewScript raises the TTL of a lease.
//
//	KEYS   lock
//	ARGV   token, TTL in ms
//	reply  1, or 0 if the key is gone or another's
//
// A repeat, also a late one, never shortens a TTL, and does nothing once the token is gone.
var renewScript = newScript(`
local value = redis.call('GET', KEYS[1])
if value == ARGV[1] then
  if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
  end
  return 1
end` + notMine)

// releaseScript ends a lease.
//
//	KEYS   lock
//	ARGV   token
//	reply  1, or 0 if the key is gone or another's
//
// A repeat answers 0: who sends it again has to remember that the first may have worked.
var releaseScript = newScript(`
local value = redis.call('GET', KEYS[1])
if value == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end` + notMine)

// holdScript ends a lease but leaves the key for a while, with a value that no late renewal of the token matches.
//
//	KEYS   lock
//	ARGV   token, the value that stays, how long in ms
//	reply  1, or 0 if the key is gone or another's
//
// A repeat finds the value that the first has left and answers 1 as well. SET is refused when memory is short; then
// the token itself stays that long.
var holdScript = newScript(`
local value = redis.call('GET', KEYS[1])
if value == ARGV[2] then
  return 1
end
if value == ARGV[1] then
  local set = redis.pcall('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
  if type(set) == 'table' and set.err then
    redis.call('PEXPIRE', KEYS[1], ARGV[3])
  end
  return 1
end` + notMine)

// single is the Store on one Redis, or one Redis Cluster: each key has one primary.
type single struct{ client call.Client }

var _ Store = single{}

// NewStore returns the Store that keeps each key on one primary: what New uses, and what a quorum is composed of. It
// panics on a client that can't carry a lock: nil, a redis.Ring, a redis.AutoPipeliner.
func NewStore(rdb redis.UniversalClient) Store {
	return single{client: call.New(rdb)}
}

// message is a command on its way, in one allocation. The token travels by pointer, which go-redis takes for the
// string: that spares another, and keeps the token out of what tracing hooks print.
type message struct {
	call.Message
	token string
	args  [9]any
}

func (s single) Acquire(ctx context.Context, r Request) (Reply, error) {
	if r.Again || r.Fence != FenceOff {
		return s.acquireByScript(ctx, r)
	}
	m := &message{token: r.Token}
	args := append(m.args[:0], "set", r.Key.Lock, &m.token, "px", r.TTL.Milliseconds(), "nx")
	cmd := redis.NewBoolCmd(ctx, args...)
	m.Cmder = cmd
	if err := outcome(s.client.Process(ctx, &m.Message)); err != nil {
		return Reply{}, err
	}
	if !cmd.Val() {
		return Reply{}, ErrHeld
	}
	return Reply{}, nil
}

func (s single) acquireByScript(ctx context.Context, r Request) (Reply, error) {
	m := &message{token: r.Token}
	args := m.call(acquireScript, 1)
	if r.Fence == FenceOff {
		args = append(args, r.Key.Lock, &m.token, r.TTL.Milliseconds())
	} else {
		args[2] = 2
		args = append(args, r.Key.Lock, r.Key.Fence, &m.token, r.TTL.Milliseconds(), r.Fence.arg())
	}
	reply, err := s.eval(ctx, m, acquireScript, args)
	if err != nil {
		return Reply{}, err
	}
	return readAcquired(reply)
}

func (f FenceMode) arg() string {
	if f == FenceClock {
		return "clock"
	}
	return "counter"
}

// readAcquired reads acquireScript's reply.
func readAcquired(reply any) (Reply, error) {
	own := false
	if list, ok := reply.([]any); ok && len(list) == 1 {
		reply, own = list[0], true
	}
	switch v := reply.(type) {
	case int64:
		return Reply{Remaining: time.Duration(v) * time.Millisecond}, ErrHeld
	case string:
		n, err := strconv.ParseInt(v, 10, 64)
		if err == nil {
			return Reply{Fence: Fence(n), Own: own}, nil
		}
	}
	return Reply{}, fmt.Errorf("%w: unexpected reply %v", ErrUnknown, reply)
}

func (s single) Release(ctx context.Context, r Request) error {
	m := &message{token: r.Token}
	sc := releaseScript
	if r.Hold > 0 {
		sc = holdScript
	}
	args := append(m.call(sc, 1), r.Key.Lock, &m.token)
	if r.Hold > 0 {
		args = append(args, r.Token+":done", r.Hold.Milliseconds()+1)
	}
	reply, err := s.eval(ctx, m, sc, args)
	if isWrongType(err) || (err == nil && reply != int64(1)) {
		return ErrLost
	}
	return err
}

// isWrongType tells a reply that no lease of ours could have caused: the key is another's.
func isWrongType(err error) bool { return call.HasCode(err, "WRONGTYPE") }

// call begins the arguments of a script with so many keys.
func (m *message) call(sc *script, keys int) []any {
	return append(m.args[:0], "evalsha", sc.sha, keys)
}

// eval sends args, which begin with call: by hash, and with the text if the server does not know the hash.
func (s single) eval(ctx context.Context, m *message, sc *script, args []any) (any, error) {
	cmd := redis.NewCmd(ctx, args...)
	m.Cmder = cmd
	err := s.client.Process(ctx, &m.Message)
	if call.HasCode(err, "NOSCRIPT") {
		args[0], args[1] = "eval", sc.text
		cmd = redis.NewCmd(ctx, args...)
		m.Cmder = cmd
		err = s.client.Process(ctx, &m.Message)
	}
	if err = outcome(err); err != nil {
		return nil, err // the command may still be running: it must not be read
	}
	return cmd.Val(), nil
}

// Renew sends one pipeline for each primary, side by side: a pipeline over several shards returns only when the
// slowest has answered.
func (s single) Renew(ctx context.Context, rs []Request, done func(int, error)) {
	groups := map[any][]int{}
	for i, r := range rs {
		node := s.client.Node(ctx, r.Key.Lock)
		groups[node] = append(groups[node], i)
	}
	var wg sync.WaitGroup
	for _, group := range groups {
		wg.Go(func() { s.renewGroup(ctx, rs, group, "evalsha", renewScript.sha, done) })
	}
	wg.Wait()
}

// renewGroup renews rs[i] for each i of the group, with evalsha and the script's hash; then, with eval and its text,
// those for which the server did not know the hash.
func (s single) renewGroup(ctx context.Context, rs []Request, group []int, eval string, sc any, done func(int, error)) {
	cmds := make([]redis.Cmder, len(group))
	for k, i := range group {
		r := &rs[i]
		cmds[k] = &call.Message{Cmder: redis.NewCmd(ctx, eval, sc, 1, r.Key.Lock, &r.Token, r.TTL.Milliseconds())}
	}
	if err := s.client.Pipeline(ctx, cmds); call.WasAbandoned(err) {
		for _, i := range group {
			done(i, outcome(err))
		}
		return
	}
	var again []int
	for k, i := range group {
		cmd := cmds[k].(*call.Message).Cmder.(*redis.Cmd)
		if eval == "evalsha" && call.HasCode(cmd.Err(), "NOSCRIPT") {
			again = append(again, i)
			continue
		}
		done(i, renewed(cmd))
	}
	if len(again) > 0 {
		s.renewGroup(ctx, rs, again, "eval", renewScript.text, done)
	}
}

// renewed is the outcome of one renewal.
func renewed(cmd *redis.Cmd) error {
	reply, err := cmd.Result()
	if isWrongType(err) || (err == nil && reply != int64(1)) {
		return ErrLost
	}
	return outcome(err)
}

// outcome translates the error of a command into what a Store answers.
func outcome(err error) error {
	switch call.ClassOf(err) {
	case call.Done:
		return nil
	case call.Never:
		return Permanent(err)
	case call.NotDone:
		return err
	default:
		return fmt.Errorf("%w: %w", ErrUnknown, err)
	}
}
