package call_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock/internal/call"
	"github.com/seed-b640e7e9/lock/internal/redistest"
)

func get(ctx context.Context, c call.Client) error {
	return c.Process(ctx, &call.Message{Cmder: redis.NewCmd(ctx, "get", "k")}, 0)
}

func TestACommandIsSentAtMostOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.Mini(t)
		p := redistest.ProxyMini(t, m)
		c := call.New(p.Client(t))
		p.On(redistest.Any(), redistest.DropReply())
		err := get(context.Background(), c)
		require.Equal(t, call.Unknown, call.ClassOf(err))
		err = c.Pipeline(t.Context(), []redis.Cmder{&call.Message{Cmder: redis.NewCmd(t.Context(), "get", "p")}})
		require.Equal(t, call.Unknown, call.ClassOf(err))
		require.Equal(t, 1, p.Count(redistest.Arg("k")))
		require.Equal(t, 1, p.Count(redistest.Arg("p")))
	})
}

// whereabouts is a hook that notes which goroutine runs commands.
type whereabouts struct{ last []byte }

func (w *whereabouts) DialHook(next redis.DialHook) redis.DialHook { return next }
func (w *whereabouts) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (w *whereabouts) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		w.last = goroutine()
		return next(ctx, cmd)
	}
}

// goroutine returns the line that a stack trace begins with, up to the number.
func goroutine() []byte {
	stack := make([]byte, 64)
	stack = stack[:runtime.Stack(stack, false)]
	return bytes.Join(bytes.Fields(stack)[:2], nil)
}

func TestACommandLeavesTheCallersGoroutineOnlyWhereItMust(t *testing.T) {
	can, cancel := context.WithCancel(t.Context())
	defer cancel()
	for _, c := range []struct {
		inline bool
		ctx    context.Context
		stays  bool
	}{
		{true, can, true}, {true, context.Background(), true}, {false, context.Background(), true}, {false, can, false},
	} {
		m := redistest.Mini(t)
		rdb := redistest.MiniClient(t, m, func(o *redis.Options) { o.ContextTimeoutEnabled = c.inline })
		w := &whereabouts{}
		rdb.AddHook(w)
		require.ErrorIs(t, get(c.ctx, call.New(rdb)), redis.Nil)
		require.Equal(t, c.stays, bytes.Equal(w.last, goroutine()), "%+v", c)
	}
}

func TestACommandIsLeftWhenItsTimeIsOver(t *testing.T) {
	for _, inline := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			m := redistest.Mini(t)
			p := redistest.ProxyMini(t, m)
			c := call.New(p.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = inline }))
			require.ErrorIs(t, get(t.Context(), c), redis.Nil) // the connection is made
			p.Silence()

			ctx, cancel := context.WithCancel(t.Context())
			start := time.Now()
			err := get(ctx, c)
			cancel()
			require.Equal(t, call.Unknown, call.ClassOf(err))
			require.NotErrorIs(t, err, context.Canceled)
			require.Equal(t, call.Limit, time.Since(start), "no command takes longer")

			p.Cut()
			p.Heal()
			require.Eventually(t, func() bool { return errors.Is(get(t.Context(), c), redis.Nil) }, time.Minute, time.Second)
			p.Silence()
			ctx, cancel = context.WithTimeout(t.Context(), 100*time.Millisecond)
			start = time.Now()
			err = get(ctx, c)
			cancel()
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.True(t, call.WasAbandoned(err))
			require.Equal(t, call.Unknown, call.ClassOf(err))
			require.LessOrEqual(t, time.Since(start), 120*time.Millisecond)
			p.Cut()
			p.Heal()
		})
	}
}

func TestAContextThatHasEndedSendsNothing(t *testing.T) {
	m := redistest.Mini(t)
	p := redistest.ProxyMini(t, m)
	why := errors.New("why")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(why)
	err := get(ctx, call.New(p.Client(t)))
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, err, why)
	require.Equal(t, call.NotDone, call.ClassOf(err))
	require.Zero(t, p.Count(redistest.Any()))
}

func TestAnAnswerThatComesJustAfterTheEndIsUsed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.Mini(t)
		p := redistest.ProxyMini(t, m)
		p.On(redistest.Any(), redistest.DelayReply(110*time.Millisecond))
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, get(ctx, call.New(p.Client(t))), redis.Nil)
	})
}

type reply string

func (r reply) Error() string { return string(r) }
func (reply) RedisError()     {}

func TestErrorsAreClassedByWhatTheySayOfTheOutcome(t *testing.T) {
	dial := &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
	for err, class := range map[error]call.Class{
		redis.Nil:                                  call.Done,
		redis.ErrClosed:                            call.Never,
		redis.ErrPoolTimeout:                       call.NotDone,
		redis.ErrPoolExhausted:                     call.NotDone,
		dial:                                       call.NotDone,
		&net.OpError{Op: "read", Err: io.EOF}:      call.Unknown,
		io.EOF:                                     call.Unknown,
		syscall.EPIPE:                              call.Unknown,
		context.DeadlineExceeded:                   call.Unknown,
		reply("LOADING Redis is loading"):          call.NotDone,
		reply("READONLY You can't write"):          call.NotDone,
		reply("OOM command not allowed"):           call.NotDone,
		reply("BUSY Redis is busy"):                call.NotDone,
		reply("MOVED 1 127.0.0.1:1"):               call.NotDone,
		reply("NOREPLICAS Not enough"):             call.NotDone,
		reply("MISCONF Redis is configured"):       call.NotDone,
		reply("ERR max number of clients reached"): call.NotDone,
		reply("ERR Error running script (call to f_1): @user_script: 4: -READONLY You can't write"): call.NotDone,
		reply("ERR Error running script (call to f_1): @user_script: 1: -WRONGTYPE Operation"):      call.Never,
		reply("NOAUTH Authentication required."):                                                    call.Never,
		reply("NOPERM this user has no permissions"):                                                call.Never,
		reply("WRONGTYPE Operation against a key"):                                                  call.Never,
		reply("ERR The user executing the script can't run this command"):                           call.Never,
		reply("ERR wrong number of arguments"):                                                      call.Never,
		reply("CROSSSLOT Keys in request"):                                                          call.Never,
	} {
		require.Equal(t, class, call.ClassOf(err), "%v", err)
		require.Equal(t, class, call.ClassOf(fmt.Errorf("wrapped: %w", err)), "%v", err)
	}
	require.Equal(t, call.Done, call.ClassOf(nil))
	require.False(t, call.HasCode(nil, "ERR"))
	require.False(t, call.HasCode(io.EOF, "EOF"), "not a reply")
	require.False(t, call.HasCode(reply("OOM not NOSCRIPT"), "NOSCRIPT"), "only an ERR is searched")
}

func TestClientsThatCantCarryALockAreRefused(t *testing.T) {
	ring := redis.NewRing(&redis.RingOptions{})
	defer ring.Close()
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer rdb.Close()
	auto, err := rdb.AutoPipeline()
	require.NoError(t, err)
	defer auto.Close()
	for _, c := range []redis.UniversalClient{nil, (*redis.Client)(nil), (*redis.ClusterClient)(nil), ring, auto} {
		require.Panics(t, func() { call.New(c) }, "%T", c)
	}
	require.NotPanics(t, func() { call.New(rdb) })
	require.Equal(t, call.New(rdb), call.New(rdb), "Clients on one go-redis client are equal")
}

func TestDeadlinesAreLeftToTheClientOnlyIfItSetsThem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.Mini(t)
		p := redistest.ProxyMini(t, m)
		c := call.New(p.Client(t, func(o *redis.Options) {
			o.ContextTimeoutEnabled = true
			o.ReadTimeout = -2 // no socket deadlines at all
		}))
		require.ErrorIs(t, get(t.Context(), c), redis.Nil)
		p.Silence()
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		start := time.Now()
		require.ErrorIs(t, get(ctx, c), context.DeadlineExceeded)
		require.LessOrEqual(t, time.Since(start), 120*time.Millisecond)
		p.Cut()
	})
}

// reloading stands for a cluster client.
type reloading struct {
	*redis.Client
	n atomic.Int64
}

func (r *reloading) ReloadState(context.Context) { r.n.Add(1) }

func TestASilentPrimaryIsLookedForAlsoWhereCallersHaveDeadlines(t *testing.T) {
	for _, inline := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			t.Cleanup(func() { time.Sleep(10 * time.Second) })
			p := redistest.ProxyMini(t, redistest.Mini(t))
			r := &reloading{Client: p.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = inline })}
			c := call.New(r)
			p.Silence()
			for range 5 {
				ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
				_ = c.Process(ctx, &call.Message{Cmder: redis.NewCmd(ctx, "get", "k")}, 0)
				_ = c.Pipeline(ctx, []redis.Cmder{&call.Message{Cmder: redis.NewCmd(ctx, "get", "k")}})
				cancel()
			}
			p.Heal()
			require.NotZero(t, r.n.Load())
		})
	}
}
