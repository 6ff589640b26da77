package lock_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/internal/keys"
	"github.com/seed-b640e7e9/lock/internal/redistest"
)

// onServers runs f on every kind of server and on a cluster, with a prefix of its own.
func onServers(t *testing.T, f func(t *testing.T, rdb redis.UniversalClient)) {
	t.Helper()
	for _, kind := range redistest.Kinds() {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			f(t, redistest.Shared(t, kind).Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true }))
		})
	}
	t.Run("cluster", func(t *testing.T) {
		t.Parallel()
		f(t, redistest.StartCluster(t, redistest.Redis7, 3).Client(t))
	})
	t.Run("miniredis", func(t *testing.T) { f(t, redistest.MiniClient(t, redistest.Mini(t))) })
}

func TestAStaleFenceWritesNothing(t *testing.T) {
	onServers(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		for _, key := range []string{"fenced-value", "{tag}:value", "un}paired", "bro{ken", "{}", "9"} {
			value := func() string { return rdb.Get(ctx, key).Val() }
			require.NoError(t, lock.Fence(9).Set(ctx, rdb, key, "nine"))
			require.NoError(t, lock.Fence(9).Set(ctx, rdb, key, "nine again"))
			require.NoError(t, lock.Fence(10).Set(ctx, rdb, key, "ten"), "10 is newer than 9, although \"10\" < \"9\"")
			err := lock.Fence(9).Set(ctx, rdb, key, "late")
			require.ErrorIs(t, err, lock.ErrStale)
			var e *lock.Error
			require.ErrorAs(t, err, &e)
			require.Equal(t, key, e.Name)
			require.Equal(t, "ten", value())

			require.NoError(t, lock.Fence(9007199254740993).Set(ctx, rdb, key, []byte("exact")))
			require.ErrorIs(t, lock.Fence(9007199254740992).Set(ctx, rdb, key, "rounded"), lock.ErrStale)
			require.Equal(t, "exact", value())
			require.ErrorIs(t, lock.Fence(0).Set(ctx, rdb, key, "none"), lock.ErrNoFence)
			require.ErrorIs(t, lock.Fence(-1).Set(ctx, rdb, key, "none"), lock.ErrNoFence)
			require.NoError(t, rdb.Del(ctx, key, keys.Mark(key)).Err())
		}
	})
}

func TestAFencedWriteOfUnknownOutcomeMayBeRepeated(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		w.proxy.On(redistest.Any(), redistest.DropReply()).Times(1)
		require.ErrorIs(t, lock.Fence(1).Set(t.Context(), w.rdb, "k", "v"), lock.ErrUnknown)
		require.NoError(t, lock.Fence(1).Set(t.Context(), w.rdb, "k", "v"))
		require.Equal(t, "v", w.rdb.Get(t.Context(), "k").Val())
	})
}

func TestC29FencesRiseWhateverHappensToTheLock(t *testing.T) {
	onServers(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		const name = "c29"
		require.NoError(t, rdb.Set(ctx, keys.Fence("", name), "9007199254740992", 0).Err())
		l := lock.New(rdb, lock.WithFencing())
		want := lock.Fence(9007199254740992)
		next := func(l *lock.Locker) *lock.Lock {
			t.Helper()
			lk := acquire(t, l, name)
			want++
			require.Equal(t, want, lk.Fence())
			require.EqualValues(t, want, must(rdb.Get(ctx, keys.Fence("", name)).Int64()), "each equals the stored value")
			return lk
		}
		for range 4 {
			release(t, next(l))
		}
		expiring := next(l.With(lock.WithTTL(100*time.Millisecond), lock.WithMaxHold(time.Millisecond)))
		<-expiring.Context().Done()
		deleted := next(l)
		require.NoError(t, rdb.Del(ctx, keys.Lock("", name)).Err())
		last := next(l)
		require.ErrorIs(t, deleted.Release(ctx), lock.ErrLost)
		release(t, last)
	})
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func TestALostReplyRepeatsTheFence(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		for i, mode := range []lock.Option{lock.WithFencing(), lock.WithClockFencing()} {
			l := w.locker(t, mode)
			name := string(rune('a' + i))
			first := acquire(t, l, name)
			release(t, first)
			w.proxy.On(redistest.Any(), redistest.DropReply()).Times(1)
			lk := acquire(t, l, name)
			require.Greater(t, lk.Fence(), first.Fence())
			stored := must(w.mini.Get(keys.Fence("", name)))
			require.EqualValues(t, must(redis.NewStringResult(stored, nil).Int64()), lk.Fence(), "the current one, and not a second")
			release(t, lk)
		}
	})
}

func TestClockFencesRiseWhenRedisHasLostItsData(t *testing.T) {
	server := redistest.Start(t, redistest.Redis7)
	rdb := server.Client(t)
	l := lock.New(rdb, lock.WithClockFencing())
	var last lock.Fence
	for range 3 {
		lk := acquire(t, l, "n")
		require.Greater(t, lk.Fence(), last)
		last = lk.Fence()
		require.NoError(t, rdb.FlushAll(t.Context()).Err())
		require.ErrorIs(t, lk.Release(t.Context()), lock.ErrLost)
	}
	// A counter that is ahead of the clock goes on from where it is.
	require.NoError(t, rdb.Set(t.Context(), keys.Fence("", "n"), "9007199254740993", 0).Err())
	lk := acquire(t, l, "n")
	require.EqualValues(t, 9007199254740994, lk.Fence())
	release(t, lk)

	plain := lock.New(rdb, lock.WithFencing())
	lk = acquire(t, plain, "plain")
	release(t, lk)
	require.NoError(t, rdb.FlushAll(t.Context()).Err())
	lk = acquire(t, plain, "plain")
	require.EqualValues(t, 1, lk.Fence(), "the plain counter starts again: documented")
	release(t, lk)
}

func TestACounterThatCantRiseMeansNoLock(t *testing.T) {
	onServers(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		l := lock.New(rdb, lock.WithFencing())
		for what, preset := range map[string]func(key string) error{
			"overflow":   func(key string) error { return rdb.Set(ctx, key, "9223372036854775807", 0).Err() },
			"no number":  func(key string) error { return rdb.Set(ctx, key, "x", 0).Err() },
			"wrong type": func(key string) error { return rdb.LPush(ctx, key, "x").Err() },
		} {
			if what == "overflow" && strings.HasSuffix(t.Name(), "miniredis") {
				continue // where INCR wraps around
			}
			require.NoError(t, preset(keys.Fence("", what)), what)
			_, err := l.Acquire(ctx, what)
			require.Error(t, err, what)
			require.NotErrorIs(t, err, lock.ErrHeld, what)
			require.NotErrorIs(t, err, lock.ErrUnknown, what)
			require.Zero(t, rdb.Exists(ctx, keys.Lock("", what)).Val(), what)
		}
	})
}

func TestTheProtectedValueIsNeverOverwrittenByAnOlderHolder(t *testing.T) {
	server := redistest.Shared(t, redistest.Redis7)
	rdb := server.Client(t)
	var wg sync.WaitGroup
	for f := range lock.Fence(64) {
		wg.Go(func() { _ = (f + 1).Set(context.Background(), rdb, "contended", int64(f+1)) })
	}
	wg.Wait()
	require.EqualValues(t, 64, must(rdb.Get(t.Context(), "contended").Int64()))
}
