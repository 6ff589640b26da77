package lock

import (
	"context"
	"crypto/sha1" // what Redis names scripts by
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/seed-b640e7e9/lock/internal/call"
	"github.com/seed-b640e7e9/lock/internal/wake"
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

	// Renew raises the TTLs of leases, never lowering one, and reserves fences where a request has a Count. It calls done
	// exactly once for each request, maybe from several goroutines and as soon as that request is decided, and returns
	// after the last. ErrLost says that the key is gone or another's.
	Renew(ctx context.Context, rs []Request, done func(i int, r Reply, err error))

	// Release deletes the key if it has the token, or leaves it, of no more use to the token, for the request's Hold, and
	// tells those who listen to the key. ErrLost says that the key is gone or another's.
	Release(ctx context.Context, r Request) (Reply, error)

	// Listen returns when it is certain that wake will be called for each Release of the key from now on, with its From, and
	// with "" whenever one may have been missed. wake does not block. The error matches errors.ErrUnsupported if there is no use in asking
	// again. stop ends listening; it does not block.
	Listen(ctx context.Context, key Key, wake func(from string)) (stop func(), err error)

	// Wait returns nil when nothing of the Store runs in the background and nobody listens, or ctx's error. It ends what
	// is only kept for the next use.
	Wait(ctx context.Context) error
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
	TTL   time.Duration // of Acquire and Renew, in whole milliseconds; of Release, how long the key may last at most
	Fence FenceMode     // of Acquire, and of Renew with a Count
	Again bool          // of Acquire: the token was sent before, or the key is known to be held: ask for more than a yes
	Used  bool          // of Acquire: the token was sent before
	Count int           // of Acquire: fences to reserve beside the grant's own; of Renew: grants that are to follow
	Floor Fence         // of Renew: the highest fence known: the counter rises to it, and what is reserved lies above
	Hold  time.Duration // of Release: how much longer the key stays, although nobody holds it
	From  string        // of Release: what those who listen hear, so that they know whether they knew
	Quiet bool          // of Release: nobody is told
	Limit time.Duration // of Acquire and Release: how long the command may take; zero: a second
	Live  func() bool   // of Renew: whether the lease is held still; nil: it is
}

// Reply is what a Store answers.
type Reply struct {
	Fence     Fence         // of Acquire, the last number that was reserved or, without a Count, the grant's own; of Renew the same
	Own       bool          // of Acquire: the key had the token already, from an earlier send, and nothing was reserved
	Spent     bool          // of a failed Acquire: the token was given up, with clean-up and all; the next try needs another
	Remaining time.Duration // of ErrHeld: when the key ends unless it is renewed; not positive if unknown
	Holder    string        // of ErrHeld: the same for the same token; empty if unknown
	Token     string        // of Acquire: what the key has now, if it is not the request's
	Listeners int           // of Release, and of Renew with a Count: who listens to the key; negative if unknown
	Mute      error         // of Release: why those who listen were not told, if they were not
}

// Permanent marks err as one that waiting does not heal: a waiting Acquire gives up at once. A nil err stays nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return permanent{err}
}

// IsPermanent tells whether err was marked by Permanent.
func IsPermanent(err error) bool {
	var p permanent
	return errors.As(err, &p)
}

type permanent struct{ error }

func (p permanent) Unwrap() error { return p.error }

// script is Lua text and the hash that it is called by, as arguments of commands.
type script struct{ text, sha any }

func newScript(text string) *script {
	sum := sha1.Sum([]byte(text))
	return &script{text: text, sha: hex.EncodeToString(sum[:])}
}

// raise is Lua that raises the fence counter: by a number, from at least floor and, if mode says so, from the server's
// clock in microseconds; the local fence is then the counter, as a string. Fences travel as strings and are compared by
// length and then bytes, as Lua's numbers are exact up to 2^53 only; INCRBY adds exactly.
const raise = `
  if mode == 'clock' then
    local t = redis.call('TIME')
    local now = string.format('%.0f', t[1] * 1000000 + t[2] - 1)
    if #now > #floor or (#now == #floor and now > floor) then
      floor = now
    end
  end
  local last = floor ~= '0' and redis.call('GET', KEYS[2]) or '0'
  if #floor > #last or (#floor == #last and floor > last) then
    redis.call('SET', KEYS[2], floor)
  end
  redis.call('INCRBY', KEYS[2], by)
  fence = redis.call('GET', KEYS[2])
`

// refusal is Lua that ends a script which has found another value than the token, or none, with the READONLY error of a
// replica: a replica answers reads, although it may be behind, so the script tries a write that changes nothing. Then
// nothing has been learnt. On a primary the script goes on.
const refusal = `
  local probe
  if value then
    probe = redis.pcall('SET', KEYS[1], '', 'PX', 1, 'NX')
  else
    probe = redis.pcall('DEL', KEYS[1])
  end
  if type(probe) == 'table' and probe.err and string.find(probe.err, 'READONLY', 1, true) then
    return probe
  end
`

// notMine ends a script that has found another value than the token, or none.
const notMine = refusal + `
return 0
`

// acquireScript takes a lease.
//
//	KEYS   lock [, fence counter]
//	ARGV   token, TTL in ms [, how many fences, "counter" or "clock"]
//	reply  held by another: {its PTTL, the start of its token's hash}; granted: the last of the fences, as a string;
//	       granted to the same token before: {the counter}
//
// A repeat finds its own token and changes nothing but a TTL that is too short. The counter rises before the key is
// set: if it can't rise there is no lock, and numbers that nobody got are only skipped.
var acquireScript = newScript(`
local value = redis.call('GET', KEYS[1])
if value and value ~= ARGV[1] then
` + refusal + `
  return {redis.call('PTTL', KEYS[1]), string.sub(redis.sha1hex(value), 1, 16)}
end
if value then
  if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
  end
end
local fence = '0'
if KEYS[2] then
  fence = value and redis.call('GET', KEYS[2])
end
if not fence then
  local by, floor, mode = ARGV[3], '0', ARGV[4]
` + raise + `
end
if value then
  return {fence}
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return fence
`)

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
end
` + notMine)

// prolongScript raises the TTL of a lease that several grants are to share, reserves their fences and asks who else
// listens.
//
//	KEYS   lock [, fence counter]
//	ARGV   token, TTL in ms [, how many fences, the highest known, "counter" or "clock"]
//	reply  {listeners, the last of the fences as a string}, or 0 if the key is gone or another's; listeners is -1 if the
//	       server does not tell
//
// A repeat reserves other numbers, above; those of a reply that was lost are only skipped.
var prolongScript = newScript(`
local value = redis.call('GET', KEYS[1])
if value == ARGV[1] then
  local fence = '0'
  if KEYS[2] then
    local by, floor, mode = ARGV[3], ARGV[4], ARGV[5]
` + raise + `
  end
  if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
  end
  local listeners = redis.pcall('PUBSUB', 'SHARDNUMSUB', KEYS[1])
  if listeners.err and string.find(string.lower(listeners.err), 'unknown') then
    listeners = redis.pcall('PUBSUB', 'NUMSUB', KEYS[1])
  end
  return {listeners.err and -1 or listeners[2], fence}
end
` + notMine)

// tell is Lua that ends a script: it wakes those who listen to the key, and returns how many they are plus one, or a list with
// the reason why they were not told. The channel is the key itself, as a suffix could lie in another slot. Nothing it
// does can fail the script.
const tell = `
  if ARGV[2] == 'tell nobody' then
    return {}
  end
  local told = redis.pcall('SPUBLISH', KEYS[1], ARGV[2])
  if type(told) == 'table' and string.find(string.lower(told.err), 'unknown') then
    told = redis.pcall('PUBLISH', KEYS[1], ARGV[2])
  end
  if type(told) == 'table' then
    return {told.err}
  end
  return told + 1
`

// tellNobody is what the script gets where publishing is refused.
const tellNobody = "tell nobody"

// releaseScript ends a lease.
//
//	KEYS   lock
//	ARGV   token, what to tell or "tell nobody"
//	reply  what tell returns, or 0 if the key is gone or another's
//
// A repeat answers 0: who sends it again has to remember that the first may have worked.
var releaseScript = newScript(`
local value = redis.call('GET', KEYS[1])
if value == ARGV[1] then
  redis.call('DEL', KEYS[1])
` + tell + `
end
` + notMine)

// holdScript ends a lease but leaves the key for a while, with a value that no late renewal of the token matches.
//
//	KEYS   lock
//	ARGV   token, what to tell or "tell nobody", the value that stays, how long in ms
//	reply  what tell returns, or 0 if the key is gone or another's
//
// A repeat finds the value that the first has left and succeeds as well. SET is refused when memory is short; then
// the token itself stays that long.
var holdScript = newScript(`
local value = redis.call('GET', KEYS[1])
if value == ARGV[1] then
  local set = redis.pcall('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
  if type(set) == 'table' and set.err then
    redis.call('PEXPIRE', KEYS[1], ARGV[4])
  end
end
if value == ARGV[1] or value == ARGV[3] then
` + tell + `
end
` + notMine)

// single is the Store on one Redis, or one Redis Cluster: each key has one primary.
type single struct {
	client call.Client
	hub    *wake.Hub
	quiet  atomic.Bool // publishing is refused: each further try would only fill the server's log
}

var _ Store = (*single)(nil)

// NewStore returns the Store that keeps each key on one primary: what New uses, and what a quorum is composed of. It
// panics on a client that can't carry a lock: nil, a redis.Ring, a redis.AutoPipeliner.
func NewStore(rdb redis.UniversalClient) Store {
	return &single{client: call.New(rdb), hub: wake.New(rdb)}
}

// sameKeys tells whether two Stores keep their leases in the same place, as far as that shows.
func sameKeys(a, b Store) bool {
	x, ok := a.(*single)
	if !ok {
		return a == b
	}
	y, ok := b.(*single)
	return ok && x.client == y.client
}

// message is a command on its way, in one allocation. The token and numbers travel by pointer, which go-redis takes for
// what they point to: that spares others, and keeps the token out of what tracing hooks print.
type message struct {
	call.Message
	token string
	from  string
	ttl   int64
	args  [9]any
}

// setMessage is a SET NX.
type setMessage struct {
	message
	cmd redis.StatusCmd
}

// evalMessage is a call of a script.
type evalMessage struct {
	message
	cmd redis.Cmd
}

func (s *single) Acquire(ctx context.Context, r Request) (Reply, error) {
	if r.Again || r.Fence != FenceOff {
		return s.acquireByScript(ctx, r)
	}
	m := &setMessage{message: message{token: r.Token, ttl: r.TTL.Milliseconds()}}
	m.cmd = *redis.NewStatusCmd(ctx, append(m.args[:0], "set", r.Key.Lock, &m.token, "px", &m.ttl, "nx")...)
	m.Cmder = &m.cmd
	switch err := s.client.Process(ctx, &m.Message, r.Limit); {
	case errors.Is(err, redis.Nil):
		return Reply{}, ErrHeld
	case err != nil:
		return Reply{}, outcome(err)
	case m.cmd.Val() != "OK":
		return Reply{}, unexpected(m.cmd.Val())
	}
	return Reply{}, nil
}

func (s *single) acquireByScript(ctx context.Context, r Request) (Reply, error) {
	m := &evalMessage{message: message{token: r.Token, ttl: r.TTL.Milliseconds()}}
	args := m.call(acquireScript, 1)
	if r.Fence == FenceOff {
		args = append(args, r.Key.Lock, &m.token, &m.ttl)
	} else {
		args[2] = 2
		args = append(args, r.Key.Lock, r.Key.Fence, &m.token, &m.ttl, r.Count+1, r.Fence.arg())
	}
	reply, err := s.eval(ctx, m, acquireScript, args, r.Limit)
	if err != nil {
		return Reply{}, err
	}
	got, err := readAcquired(reply)
	if err == nil && r.Fence != FenceOff && (got.Fence <= 0 || !got.Own && got.Fence <= Fence(r.Count)) {
		return Reply{}, unexpected(reply)
	}
	return got, err
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
	if list, ok := reply.([]any); ok {
		if len(list) == 2 {
			return readHeld(list)
		}
		if len(list) == 1 {
			reply, own = list[0], true
		}
	}
	if fence, ok := readFence(reply); ok {
		return Reply{Fence: fence, Own: own}, nil
	}
	return Reply{}, unexpected(reply)
}

func readHeld(list []any) (Reply, error) {
	remaining, ok := list[0].(int64)
	holder, ok2 := list[1].(string)
	if !ok || !ok2 {
		return Reply{}, unexpected(list)
	}
	if remaining == 0 {
		remaining = 1 // less than that is left, but it is known
	}
	return Reply{Remaining: time.Duration(remaining) * time.Millisecond, Holder: holder}, ErrHeld
}

func readFence(reply any) (Fence, bool) {
	text, _ := reply.(string)
	n, err := strconv.ParseInt(text, 10, 64)
	return Fence(n), err == nil && n >= 0
}

func unexpected(reply any) error { return fmt.Errorf("%w: unexpected reply %v", ErrUnknown, reply) }

func (s *single) Release(ctx context.Context, r Request) (Reply, error) {
	m := &evalMessage{message: message{token: r.Token, from: r.From}}
	sc := releaseScript
	if r.Hold > 0 {
		sc = holdScript
	}
	if r.Quiet || s.quiet.Load() {
		m.from = tellNobody
	}
	args := append(m.call(sc, 1), r.Key.Lock, &m.token, &m.from)
	if r.Hold > 0 {
		args = append(args, r.Token+":done", r.Hold.Milliseconds()+1)
	}
	reply, err := s.eval(ctx, m, sc, args, r.Limit)
	if isWrongType(err) || reply == int64(0) {
		return Reply{}, ErrLost
	}
	if err != nil {
		return Reply{}, err
	}
	return s.readReleased(reply)
}

// readReleased reads what tell returns.
func (s *single) readReleased(reply any) (Reply, error) {
	if n, ok := reply.(int64); ok && n > 0 {
		return Reply{Listeners: int(n) - 1}, nil
	}
	list, ok := reply.([]any)
	if !ok || len(list) > 1 {
		return Reply{}, unexpected(reply)
	}
	r := Reply{Listeners: -1}
	if len(list) > 0 {
		s.quiet.Store(true)
		r.Mute = fmt.Errorf("%v", list[0])
	}
	return r, nil
}

func (s *single) Listen(ctx context.Context, key Key, wake func(from string)) (stop func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, call.Limit)
	defer cancel()
	return s.hub.Listen(ctx, key.Lock, wake)
}

func (s *single) Wait(ctx context.Context) error { return s.hub.Wait(ctx) }

// isWrongType tells a reply that no lease of ours could have caused: the key is another's.
func isWrongType(err error) bool { return call.HasCode(err, "WRONGTYPE") }

// call begins the arguments of a script with so many keys.
func (m *message) call(sc *script, keys int) []any {
	return append(m.args[:0], "evalsha", sc.sha, keys)
}

// eval sends args, which begin with call: by hash, and with the text if the server does not know the hash.
func (s *single) eval(ctx context.Context, m *evalMessage, sc *script, args []any, limit time.Duration) (any, error) {
	m.cmd = *redis.NewCmd(ctx, args...)
	m.Cmder = &m.cmd
	err := s.client.Process(ctx, &m.Message, limit)
	if call.HasCode(err, "NOSCRIPT") {
		args[0], args[1] = "eval", sc.text
		m.cmd = *redis.NewCmd(ctx, args...)
		err = s.client.Process(ctx, &m.Message, limit)
	}
	if err = outcome(err); err != nil {
		return nil, err // the command may still be running: it must not be read
	}
	return m.cmd.Val(), nil
}

// Renew sends one pipeline for each primary, side by side: a pipeline over several shards returns only when the
// slowest has answered.
func (s *single) Renew(ctx context.Context, rs []Request, done func(int, Reply, error)) {
	groups := map[any][]int{}
	for i, r := range rs {
		node := s.client.Node(ctx, r.Key.Lock)
		groups[node] = append(groups[node], i)
	}
	var wg sync.WaitGroup
	for _, group := range groups {
		wg.Go(func() { s.renewGroup(ctx, rs, group, false, done) })
	}
	wg.Wait()
}

// renewGroup renews rs[i] for each i of the group, by the scripts' hashes; then, with the text, those for which the
// server did not know the hash.
func (s *single) renewGroup(ctx context.Context, rs []Request, group []int, text bool, done func(int, Reply, error)) {
	cmds := make([]redis.Cmder, len(group))
	for k, i := range group {
		cmds[k] = &call.Message{Cmder: redis.NewCmd(ctx, rs[i].renewal(text)...)}
	}
	whole := s.client.Pipeline(ctx, cmds)
	if call.WasAbandoned(whole) {
		for _, i := range group {
			done(i, Reply{}, outcome(whole))
		}
		return
	}
	var again []int
	for k, i := range group {
		cmd := cmds[k].(*call.Message).Cmder.(*redis.Cmd)
		if !text && call.HasCode(cmd.Err(), "NOSCRIPT") {
			again = append(again, i)
			continue
		}
		if whole != nil && cmd.Err() == nil && cmd.Val() == nil {
			cmd.SetErr(whole) // go-redis does not, if the server has refused the connection
		}
		reply, err := readRenewed(cmd, rs[i].prolongs())
		done(i, reply, err)
	}
	if len(again) > 0 {
		s.renewGroup(ctx, rs, again, true, done)
	}
}

// prolongs tells whether grants are to follow.
func (r *Request) prolongs() bool { return r.Count > 0 || r.Floor > 0 }

// renewal is the command that renews, or prolongs if grants are to follow, by the script's hash or its text.
func (r *Request) renewal(text bool) []any {
	sc := renewScript
	if r.prolongs() {
		sc = prolongScript
	}
	eval, by := "evalsha", sc.sha
	if text {
		eval, by = "eval", sc.text
	}
	if sc == renewScript || r.Fence == FenceOff {
		return []any{eval, by, 1, r.Key.Lock, &r.Token, r.TTL.Milliseconds()}
	}
	return []any{
		eval, by, 2, r.Key.Lock, r.Key.Fence, &r.Token, r.TTL.Milliseconds(), r.Count, int64(r.Floor), r.Fence.arg(),
	}
}

// readRenewed reads the outcome of one renewal.
func readRenewed(cmd *redis.Cmd, prolonged bool) (Reply, error) {
	reply, err := cmd.Result()
	if isWrongType(err) || reply == int64(0) {
		return Reply{}, ErrLost
	}
	if err = outcome(err); err != nil {
		return Reply{}, err
	}
	if reply == int64(1) && !prolonged {
		return Reply{}, nil
	}
	if list, ok := reply.([]any); ok && len(list) == 2 && prolonged {
		listeners, ok := list[0].(int64)
		fence, ok2 := readFence(list[1])
		if ok && ok2 {
			return Reply{Fence: fence, Listeners: int(listeners)}, nil
		}
	}
	return Reply{}, unexpected(reply)
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
