package redistest_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock/internal/redistest"
)

// bed is what a proxy test works with: a client behind a proxy, and one that goes to the server directly.
type bed struct {
	*testing.T
	proxy  *redistest.Proxy
	client *redis.Client
	direct *redis.Client
	ctx    context.Context
}

// patience is long enough for a command on a connection that is there, on a machine that is busy.
const patience = 300 * time.Millisecond

// plain makes a client show what the network does: no retries, and one connection unless it breaks.
func plain(o *redis.Options) {
	o.MaxRetries, o.DialerRetries, o.ContextTimeoutEnabled = -1, 1, true
}

// inBubble runs a test on miniredis and in virtual time.
func inBubble(t *testing.T, test func(b *bed)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		m := redistest.Mini(t)
		p := redistest.ProxyMini(t, m)
		test(&bed{T: t, proxy: p, client: p.Client(t, plain), direct: redistest.MiniClient(t, m, plain), ctx: t.Context()})
	})
}

// onRedis runs a test on a real server and in real time.
func onRedis(t *testing.T, test func(b *bed)) {
	t.Helper()
	s := redistest.Start(t, redistest.Redis7)
	p := redistest.ProxyTo(t, s.Addr())
	test(&bed{T: t, proxy: p, client: p.Client(t, plain), direct: s.Client(t, plain), ctx: t.Context()})
}

func (b *bed) set(key string) error { return b.client.Set(b.ctx, key, "v", 0).Err() }

func (b *bed) exists(key string) bool {
	b.Helper()
	n, err := b.direct.Exists(b.ctx, key).Result()
	require.NoError(b, err)
	return n == 1
}

// awaitKey waits for a key to appear, which in a bubble costs no time.
func (b *bed) awaitKey(key string) {
	b.Helper()
	require.Eventually(b, func() bool { return b.exists(key) }, 10*time.Second, time.Millisecond)
}

// tests that hold in virtual time and in real time alike.
var proxyTests = []struct {
	name string
	test func(b *bed)
}{
	{"a dropped reply leaves the command executed and breaks the connection", func(b *bed) {
		r := b.proxy.On(redistest.Cmd("SET"), redistest.DropReply()).Times(1)
		assert.Error(b, b.set("k"))
		assert.Equal(b, 1, r.Hits())
		assert.True(b, b.exists("k"))
		assert.NoError(b, b.set("again"))
	}},
	{"a swallowed reply leaves the connection silent", func(b *bed) {
		require.NoError(b, b.set("warm"))
		r := b.proxy.On(redistest.Cmd("SET"), redistest.SwallowReply()).Times(1)
		ctx, stop := context.WithTimeout(b.ctx, patience)
		defer stop()
		assert.True(b, timedOut(b.client.Set(ctx, "k", "v", 0).Err()))
		r.Wait(b, 1)
		assert.True(b, b.exists("k"))
		assert.NoError(b, b.set("again"))
	}},
	{"a refused command never reaches the server", func(b *bed) {
		r := b.proxy.On(redistest.Cmd("SET"), redistest.Refuse()).Times(1)
		assert.Error(b, b.set("k"))
		assert.Equal(b, 1, r.Hits())
		assert.False(b, b.exists("k"))
		assert.NoError(b, b.set("k"))
	}},
	{"an error in the server's place keeps the connection", func(b *bed) {
		b.proxy.On(redistest.Cmd("SET"), redistest.ReplyError("OOM command not allowed")).Times(1)
		assert.ErrorContains(b, b.set("k"), "OOM")
		assert.False(b, b.exists("k"))
		assert.NoError(b, b.set("k"))
		assert.Equal(b, 1, b.proxy.Count(redistest.Cmd("HELLO")))
	}},
	{"a held request lands after its client has gone", func(b *bed) {
		require.NoError(b, b.set("warm"))
		r := b.proxy.On(redistest.Cmd("SET"), redistest.HoldRequest()).Times(1)
		ctx, stop := context.WithTimeout(b.ctx, patience)
		defer stop()
		assert.True(b, timedOut(b.client.Set(ctx, "k", "v", 0).Err()))
		r.Wait(b, 1)
		require.NoError(b, b.client.Close())
		assert.False(b, b.exists("k"))
		r.Release()
		b.awaitKey("k")
	}},
	{"a delayed request lands after its client has gone", func(b *bed) {
		require.NoError(b, b.set("warm"))
		b.proxy.On(redistest.Cmd("SET"), redistest.DelayRequest(5*patience)).Times(1)
		ctx, stop := context.WithTimeout(b.ctx, patience)
		defer stop()
		assert.True(b, timedOut(b.client.Set(ctx, "k", "v", 0).Err()))
		require.NoError(b, b.client.Close())
		assert.False(b, b.exists("k"))
		b.awaitKey("k")
	}},
	{"a held reply comes when it is released", func(b *bed) {
		r := b.proxy.On(redistest.Cmd("SET"), redistest.HoldReply()).Times(1)
		done := make(chan error, 1)
		go func() { done <- b.set("k") }()
		r.Wait(b, 1)
		assert.True(b, b.exists("k"))
		assert.Empty(b, done)
		r.Release()
		assert.NoError(b, <-done)
	}},
	{"a rule finds the n-th command inside a pipeline", func(b *bed) {
		b.proxy.On(redistest.Cmd("SET"), redistest.ReplyError("OOM no")).Skip(2).Times(1)
		cmds, _ := b.pipeline(5)
		for i, cmd := range cmds {
			assert.Equal(b, i != 2, cmd.Err() == nil, "command %d: %v", i, cmd.Err())
			assert.Equal(b, i != 2, b.exists(fmt.Sprint("k", i)))
		}
	}},
	{"a reply dropped inside a pipeline takes the later ones with it", func(b *bed) {
		b.proxy.On(redistest.Cmd("SET"), redistest.DropReply()).Skip(2).Times(1)
		assert.Equal(b, "+OK\r\n+OK\r\n", b.rawPipeline(5))
		b.awaitKey("k4")
	}},
	{"a refusal inside a pipeline lets the earlier commands pass and no later one", func(b *bed) {
		b.proxy.On(redistest.Cmd("SET"), redistest.Refuse()).Skip(2).Times(1)
		assert.Equal(b, "+OK\r\n+OK\r\n", b.rawPipeline(5))
		assert.True(b, b.exists("k1"))
		assert.False(b, b.exists("k2"))
		assert.False(b, b.exists("k3"))
	}},
	{"a pipeline of thousands passes", func(b *bed) {
		_, err := b.pipeline(2000)
		require.NoError(b, err)
		assert.Equal(b, 2000, b.proxy.Count(redistest.Cmd("SET")))
	}},
	{"a rule knows a script by its text", func(b *bed) {
		script := redis.NewScript("return ARGV[1]")
		r := b.proxy.On(redistest.Script("return ARGV[1]"), redistest.Watch())
		for range 2 { // EVALSHA and EVAL, then EVALSHA alone
			require.NoError(b, script.Run(b.ctx, b.client, nil, "x").Err())
		}
		assert.Equal(b, 3, r.Hits())
	}},
	{"rules apply in the order in which they were made", func(b *bed) {
		watch := b.proxy.On(redistest.Any(), redistest.Watch())
		b.proxy.On(redistest.Arg("k"), redistest.ReplyError("ERR first")).Times(1)
		second := b.proxy.On(redistest.Any(), redistest.ReplyError("ERR second"))
		assert.ErrorContains(b, b.set("k"), "first")
		assert.ErrorContains(b, b.set("k"), "second")
		second.Off()
		assert.NoError(b, b.set("k"))
		assert.Equal(b, 3, watch.Hits())
	}},
	{"silence keeps all back until it is healed", func(b *bed) {
		require.NoError(b, b.set("warm"))
		b.proxy.Silence()
		ctx, stop := context.WithTimeout(b.ctx, patience)
		defer stop()
		assert.True(b, timedOut(b.client.Set(ctx, "late", "v", 0).Err()))
		ctx, stop = context.WithTimeout(b.ctx, patience)
		defer stop()
		assert.True(b, timedOut(b.client.Set(ctx, "never", "v", 0).Err()), "a new connection")
		assert.False(b, b.exists("late"))
		b.proxy.Heal()
		b.awaitKey("late")
		assert.NoError(b, b.set("after"))
		assert.False(b, b.exists("never"))
	}},
	{"what is cut during silence is lost", func(b *bed) {
		require.NoError(b, b.set("warm"))
		b.proxy.Silence()
		ctx, stop := context.WithTimeout(b.ctx, patience)
		defer stop()
		assert.Error(b, b.client.Set(ctx, "lost", "v", 0).Err())
		b.proxy.Cut()
		b.proxy.Heal()
		assert.NoError(b, b.set("after"))
		assert.False(b, b.exists("lost"))
	}},
	{"refusal cuts connections and fails new ones", func(b *bed) {
		require.NoError(b, b.set("warm"))
		b.proxy.RefuseAll()
		assert.Error(b, b.set("k"), "the connection that was")
		var op *net.OpError
		require.ErrorAs(b, b.set("k"), &op)
		assert.Equal(b, "dial", op.Op)
		b.proxy.Heal()
		assert.NoError(b, b.set("k"))
	}},
	{"published messages pass and are no replies", func(b *bed) { b.subscribe(b.client) }},
	{"published messages pass in the old protocol too", func(b *bed) {
		b.subscribe(b.proxy.Client(b, plain, func(o *redis.Options) { o.Protocol = 2 }))
	}},
	{"a dropped subscription breaks the connection", func(b *bed) {
		r := b.proxy.On(redistest.Cmd("SUBSCRIBE"), redistest.DropReply()).Times(1)
		sub := b.client.Subscribe(b.ctx, "one")
		defer sub.Close()
		_, err := sub.Receive(b.ctx)
		assert.Error(b, err)
		assert.Equal(b, 1, r.Hits())
	}},
	{"nested and empty replies pass whole", func(b *bed) {
		got, err := b.client.Eval(b.ctx, "return {1, {'', 'two\\r\\n', {}}, false}", nil).Result()
		require.NoError(b, err)
		assert.Equal(b, []any{int64(1), []any{"", "two\r\n", []any{}}, nil}, got)
	}},
}

func (b *bed) pipeline(n int) ([]redis.Cmder, error) {
	return b.client.Pipelined(b.ctx, func(p redis.Pipeliner) error {
		for i := range n {
			p.Set(b.ctx, fmt.Sprint("k", i), "v", 0)
		}
		return nil
	})
}

// subscribe gets a message in between the replies to commands.
func (b *bed) subscribe(client *redis.Client) {
	b.Helper()
	watch := b.proxy.On(redistest.Cmd("SUBSCRIBE"), redistest.Watch())
	late := b.proxy.On(redistest.Cmd("UNSUBSCRIBE"), redistest.DropReply())
	sub := client.Subscribe(b.ctx, "one", "two")
	defer sub.Close()
	for range 2 {
		_, err := sub.Receive(b.ctx)
		require.NoError(b, err)
	}
	require.NoError(b, b.direct.Publish(b.ctx, "two", "hello").Err())
	msg, err := sub.ReceiveMessage(b.ctx)
	require.NoError(b, err)
	assert.Equal(b, "hello", msg.Payload)
	require.NoError(b, sub.Ping(b.ctx))
	_, err = sub.Receive(b.ctx)
	require.NoError(b, err, "the reply to the ping")
	assert.Equal(b, 1, watch.Hits())
	require.NoError(b, sub.Unsubscribe(b.ctx, "one"))
	late.Wait(b, 1) // it is still known which reply belongs to what
}

// rawPipeline returns what comes back until the connection ends. go-redis would not tell: where a pipeline breaks it
// gives every command of it the error, also those that were answered.
func (b *bed) rawPipeline(n int) string {
	b.Helper()
	conn, err := b.proxy.Dial(b.ctx, "tcp", "")
	require.NoError(b, err)
	defer conn.Close()
	var all bytes.Buffer
	for i := range n {
		fmt.Fprintf(&all, "*3\r\n$3\r\nSET\r\n$2\r\nk%d\r\n$1\r\nv\r\n", i)
	}
	_, err = conn.Write(all.Bytes())
	require.NoError(b, err)
	got, err := io.ReadAll(conn)
	require.NoError(b, err)
	return string(got)
}

func timedOut(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

func TestTheProxyInVirtualTime(t *testing.T) {
	for _, tt := range proxyTests {
		t.Run(tt.name, func(t *testing.T) { inBubble(t, tt.test) })
	}
}

func TestTheProxyInFrontOfRedis(t *testing.T) {
	for _, tt := range proxyTests {
		t.Run(tt.name, func(t *testing.T) { onRedis(t, tt.test) })
	}
}

func TestDelaysAreExactInVirtualTime(t *testing.T) {
	inBubble(t, func(b *bed) {
		require.NoError(b, b.set("warm"))
		b.proxy.On(redistest.Cmd("SET"), redistest.DelayReply(time.Second)).Times(1)
		b.proxy.On(redistest.Cmd("SET"), redistest.DelayRequest(2*time.Second)).Times(1)
		assert.Equal(b, time.Second, b.took(func() { require.NoError(b, b.set("k")) }))
		assert.Equal(b, 2*time.Second, b.took(func() { require.NoError(b, b.set("k")) }))
	})
}

func TestLatencyIsThatOfARoundTripWhichAPipelineShares(t *testing.T) {
	inBubble(t, func(b *bed) {
		require.NoError(b, b.set("warm"))
		_, _ = b.pipeline(1) // pipelines have a pool of their own
		b.proxy.Latency(30 * time.Millisecond)
		assert.Equal(b, 30*time.Millisecond, b.took(func() { require.NoError(b, b.set("k")) }))
		assert.Equal(b, 30*time.Millisecond, b.took(func() { _, _ = b.pipeline(100) }))
	})
}

func (b *bed) took(f func()) time.Duration {
	start := time.Now()
	f()
	return time.Since(start)
}

func TestHoursPassThroughTheProxyInVirtualTime(t *testing.T) {
	inBubble(t, func(b *bed) {
		require.NoError(b, b.client.Set(b.ctx, "k", "v", 3*time.Hour).Err())
		time.Sleep(3*time.Hour - time.Millisecond)
		assert.True(b, b.exists("k"))
		time.Sleep(time.Millisecond)
		assert.False(b, b.exists("k"))
	})
}

func TestCommandsAreRecordedWithTheirTime(t *testing.T) {
	inBubble(t, func(b *bed) {
		require.NoError(b, b.set("one"))
		time.Sleep(time.Minute)
		require.NoError(b, b.set("two"))
		all := b.proxy.Commands()
		first, second := all[len(all)-2], all[len(all)-1]
		assert.Equal(b, []string{"set", "one", "v"}, first.Args)
		assert.Equal(b, time.Minute, second.At.Sub(first.At))
	})
}

func TestWaitBlocksDurablyInABubble(t *testing.T) {
	inBubble(t, func(b *bed) {
		r := b.proxy.On(redistest.Cmd("SET"), redistest.Watch())
		go func() {
			time.Sleep(20 * time.Second)
			_ = b.set("one")
			_ = b.set("two")
		}()
		assert.Equal(b, 20*time.Second, b.took(func() { r.Wait(b, 2) }))
		synctest.Wait()
	})
}

func TestAMiniClientCarriesAPipelineOfThousands(t *testing.T) {
	inBubble(t, func(b *bed) {
		b.client = b.direct
		_, err := b.pipeline(2000)
		require.NoError(b, err)
	})
}

func TestAListeningProxyServesSockets(t *testing.T) {
	s := redistest.Start(t, redistest.Redis7)
	p := redistest.ProxyTo(t, s.Addr())
	client := redis.NewClient(&redis.Options{Addr: p.Listen(t), MaxRetries: -1, DialerRetries: 1})
	defer client.Close()
	require.NoError(t, client.Set(t.Context(), "k", "v", 0).Err())
	p.On(redistest.Cmd("GET"), redistest.DropReply()).Times(1)
	assert.Error(t, client.Get(t.Context(), "k").Err())
	assert.Equal(t, "v", client.Get(t.Context(), "k").Val())
	p.RefuseAll()
	assert.Error(t, client.Get(t.Context(), "k").Err())
	p.Heal()
	assert.Equal(t, "v", client.Get(t.Context(), "k").Val())
}

func TestTheClientLearnsThatTheServerHasGone(t *testing.T) {
	s := redistest.Start(t, redistest.Redis7)
	p := redistest.ProxyTo(t, s.Addr())
	client := p.Client(t, plain)
	require.NoError(t, client.Ping(t.Context()).Err())
	s.Kill()
	assert.Error(t, client.Ping(t.Context()).Err(), "the connection that was")
	assert.ErrorContains(t, client.Ping(t.Context()).Err(), "refused")
}
