package redistest_test

import (
	"context"
	"fmt"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock/internal/redistest"
)

func TestAServerOfEachKindRunsScriptsAndForgetsOnRestart(t *testing.T) {
	for _, kind := range redistest.Kinds() {
		t.Run(string(kind), func(t *testing.T) {
			s := redistest.Start(t, kind)
			client := s.Client(t)
			require.NoError(t, client.Set(t.Context(), "k", "v", 0).Err())
			got, err := client.Eval(t.Context(), "return redis.call('GET', KEYS[1])", []string{"k"}).Text()
			require.NoError(t, err)
			assert.Equal(t, "v", got)
			addr := s.Addr()
			s.Restart(t)
			assert.Equal(t, addr, s.Addr())
			assert.ErrorIs(t, client.Get(t.Context(), "k").Err(), redis.Nil)
		})
	}
}

func TestArgsOverrideWhatAServerIsStartedWith(t *testing.T) {
	s := redistest.Start(t, redistest.Redis7, "--appendonly", "yes", "--appendfsync", "always")
	client := s.Client(t)
	require.NoError(t, client.Set(t.Context(), "k", "v", 0).Err())
	s.Restart(t)
	assert.Equal(t, "v", client.Get(t.Context(), "k").Val())
}

func TestAServerThatAsksForAPasswordStarts(t *testing.T) {
	s := redistest.Start(t, redistest.Redis7, "--requirepass", "secret")
	client := s.Client(t, func(o *redis.Options) { o.Password = "secret" })
	require.NoError(t, client.Ping(t.Context()).Err())
}

func TestAPausedServerAnswersWhenItIsResumed(t *testing.T) {
	s := redistest.Start(t, redistest.Redis7)
	client := s.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled, o.MaxRetries = true, -1 })
	require.NoError(t, client.Ping(t.Context()).Err())

	s.Pause()
	ctx, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer stop()
	assert.Error(t, client.Set(ctx, "late", "v", 0).Err())
	s.Resume()
	// Redis serves its connections in no particular order: what was sent before the pause ended lands in any case.
	require.Eventually(t, func() bool { return client.Get(t.Context(), "late").Val() == "v" }, 5*time.Second, time.Millisecond)
}

func TestAKilledServerRefusesConnections(t *testing.T) {
	s := redistest.Start(t, redistest.Redis7)
	client := s.Client(t, func(o *redis.Options) { o.MaxRetries, o.DialerRetries = -1, 1 })
	s.Kill()
	assert.ErrorContains(t, client.Ping(t.Context()).Err(), "refused")
	s.Kill() // again, which does nothing
}

func TestAPausedServerCanBeKilled(t *testing.T) {
	s := redistest.Start(t, redistest.Redis7)
	s.Pause()
	s.Restart(t)
	require.NoError(t, s.Client(t).Ping(t.Context()).Err())
}

func TestAllTestsShareOneServerOfAKind(t *testing.T) {
	s := redistest.Shared(t, redistest.Redis7)
	assert.Same(t, s, redistest.Shared(t, redistest.Redis7))
	require.NoError(t, s.Client(t).Ping(t.Context()).Err())
}

func TestAClusterServesEveryNodesSlots(t *testing.T) {
	c := redistest.StartCluster(t, redistest.Redis7, 3)
	require.Len(t, c.Addrs(), 3)
	client := c.Client(t)
	for _, key := range []string{"a", "b", "c", "d", "e"} {
		require.NoError(t, client.Set(t.Context(), key, "v", 0).Err())
	}
	keys := int64(0)
	for _, s := range c.Servers {
		n, err := s.Client(t).DBSize(t.Context()).Result()
		require.NoError(t, err)
		keys += n
	}
	assert.EqualValues(t, 5, keys)
}

func TestASentinelsClientFollowsAFailover(t *testing.T) {
	s := redistest.StartSentinel(t)
	client := s.Client(t)
	require.NoError(t, client.Set(t.Context(), "k", "v", 0).Err())
	old, replica := s.Primary(t), s.Replica(t)

	s.Failover(t)

	assert.Same(t, replica, s.Primary(t))
	assert.Same(t, old, s.Replica(t))
	require.Eventually(t, func() bool {
		info, err := client.Info(t.Context(), "server").Result()
		return err == nil && strings.Contains(info, "tcp_port:"+port(replica.Addr()))
	}, 10*time.Second, 10*time.Millisecond)
}

func TestASentinelReplacesADeadPrimary(t *testing.T) {
	s := redistest.StartSentinel(t)
	old := s.Primary(t)
	old.Kill()
	s.AwaitFailover(t, old)
	assert.NotSame(t, old, s.Primary(t))
}

func TestAMissingServerSkipsTheTestUnlessInCI(t *testing.T) {
	t.Setenv("LOCK_REDISTEST_DIR", t.TempDir())
	t.Setenv("CI", "")
	t.Run("skipped", func(t *testing.T) {
		defer func() { assert.True(t, t.Skipped()) }()
		redistest.Start(t, redistest.Valkey9)
	})
	t.Setenv("CI", "true")
	tb := &fatalTB{TB: t}
	done := make(chan struct{})
	go func() {
		defer close(done)
		redistest.Start(tb, redistest.Valkey9)
	}()
	<-done
	assert.Contains(t, tb.msg, "bash internal/redistest/servers.sh")
}

// fatalTB notes a Fatal instead of failing.
type fatalTB struct {
	testing.TB
	msg string
}

func (tb *fatalTB) Fatal(args ...any) {
	tb.msg = fmt.Sprint(args...)
	runtime.Goexit()
}

func TestTheScriptExplainsItself(t *testing.T) {
	out, err := exec.Command("bash", "servers.sh", "-h").CombinedOutput()
	require.NoError(t, err)
	assert.Contains(t, string(out), "LOCK_REDISTEST_DIR")
}

func port(addr string) string { return addr[strings.LastIndex(addr, ":")+1:] }
