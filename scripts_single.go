package lock

import (
	"context"
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

// single is the Store on one Redis, or one Redis Cluster: each key has one primary.
type single struct {
	client *call.Batcher
	hub    *wake.Hub
	quiet  atomic.Bool // publishing is refused: each further try would only fill the server's log
}

var _ Store = (*single)(nil)

// NewStore returns the Store that keeps each key on one primary: what New uses, and what a quorum is composed of. It
// panics on a client that can't carry a lock: nil, a redis.Ring, a redis.AutoPipeliner.
func NewStore(rdb redis.UniversalClient) Store {
	return &single{client: call.NewBatcher(call.New(rdb)), hub: wake.New(rdb)}
}

// sameKeys tells whether two Stores keep their leases in the same place, as far as that shows.
func sameKeys(a, b Store) bool {
	x, ok := a.(*single)
	if !ok {
		return a == b
	}
	y, ok := b.(*single)
	return ok && x.client.Client == y.client.Client
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
