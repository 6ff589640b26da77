// Package fuzz_test gives the library bad input: names, prefixes, options, and a server that answers anything.
package fuzz_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/internal/keys"
	"github.com/seed-b640e7e9/lock/internal/redistest"
)

func TestMain(m *testing.M) {
	redis.SetLogger(&logging.VoidLogger{}) // it tells of each reply that it does not like
	os.Exit(redistest.Main(m))
}

// made returns a Locker, or what New has panicked with.
func made(rdb redis.UniversalClient, opts ...lock.Option) (l *lock.Locker, refused string) {
	defer func() {
		if r := recover(); r != nil {
			refused = fmt.Sprint(r)
		}
	}()
	return lock.New(rdb, opts...), ""
}

// fencing returns the options for a kind of fences.
func fencing(kind byte) []lock.Option {
	return [][]lock.Option{nil, {lock.WithFencing()}, {lock.WithClockFencing()}}[kind%3]
}

// wait is Locker.Wait, which must not take long when nothing is held.
func wait(t *testing.T, l *lock.Locker) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
	defer cancel()
	require.NoError(t, l.Wait(ctx))
}

func FuzzEveryNameCanBeLockedUnderEveryValidPrefix(f *testing.F) {
	for _, name := range []string{
		"", "a", "payment", "\x00", "\xff\xfe", "{", "}", "{}", "{a}b", "}{", "{}{a}", "a b\r\n", "*1\r\n$4\r\nQUIT\r\n", "ü",
		strings.Repeat("x", 300),
	} {
		for i, prefix := range []string{"", "app:", "{t}", "{", "{}", "}", "a{b}c", "\r\n", "\x00"} {
			f.Add(prefix, name, byte(i))
		}
	}
	f.Fuzz(func(t *testing.T, prefix, name string, fences byte) {
		m := redistest.Mini(t)
		l, refused := made(redistest.MiniClient(t, m, obedient), append(fencing(fences), lock.WithPrefix(prefix))...)
		if keys.CheckPrefix(prefix) != nil {
			require.Contains(t, refused, "lock: WithPrefix: ")
			return
		}
		require.Empty(t, refused)
		lk, err := l.TryAcquire(t.Context(), name)
		if name == "" {
			require.ErrorContains(t, err, "empty name")
			require.Empty(t, m.Keys())
			return
		}
		require.NoError(t, err)
		require.Equal(t, name, lk.Name())
		require.Equal(t, fences%3 != 0, lk.Fence() > 0)
		require.Contains(t, m.Keys(), prefix+"lock:"+name)
		_, err = l.TryAcquire(t.Context(), name)
		require.ErrorIs(t, err, lock.ErrHeld)
		require.NotEmpty(t, err.Error())
		require.NoError(t, lk.Release(t.Context()))
		wait(t, l)
		if fences%3 == 0 {
			require.Empty(t, m.Keys())
		} else {
			require.Equal(t, []string{keys.Fence(prefix, name)}, m.Keys())
		}
	})
}

func FuzzOptionsAreRefusedOrWork(f *testing.F) {
	const ms, s, year = int64(time.Millisecond), int64(time.Second), int64(365 * 24 * time.Hour)
	f.Add(10*s, int64(0), int64(0), int64(0), 16, byte(0))
	for _, d := range []int64{-1 << 63, -1, 0, 1, ms, 10*ms - 1, 10 * ms, 10*ms + 1, s, 10 * year, 10*year + 1, 1<<63 - 1} {
		f.Add(d, int64(0), int64(0), int64(0), 16, byte(0))
		f.Add(s, d, int64(0), int64(0), 0, byte(1))
		f.Add(s, int64(0), d, int64(0), 1024, byte(2))
		f.Add(s, int64(0), int64(0), d, -1, byte(0))
		f.Add(s, d, d, d, 1025, byte(0))
		f.Add(d, d, d, d, 1, byte(1))
	}
	f.Fuzz(func(t *testing.T, ttl, maxWait, maxHold, minHold int64, handoffs int, fences byte) {
		synctest.Test(t, func(t *testing.T) { // so that a TTL of 10 ms is not a matter of luck
			m := redistest.Mini(t)
			l, refused := made(redistest.MiniClient(t, m, obedient), append(fencing(fences),
				lock.WithTTL(time.Duration(ttl)), lock.WithMaxWait(time.Duration(maxWait)), lock.WithMaxHold(time.Duration(maxHold)),
				lock.WithMinHold(time.Duration(minHold)), lock.WithMaxHandoffs(handoffs))...)
			if l == nil {
				require.True(t, strings.HasPrefix(refused, "lock: "), refused)
				return
			}
			lk, err := l.TryAcquire(t.Context(), "name")
			require.NoError(t, err)
			require.True(t, lk.Valid())
			left := time.Until(lk.Deadline())
			require.Positive(t, left)
			require.LessOrEqual(t, left, time.Duration(ttl))
			require.NoError(t, lk.Release(t.Context()))
			require.False(t, lk.Valid())
			wait(t, l)
			require.Equal(t, minHold > 0, m.Exists("lock:name"))
		})
	})
}

// obedient makes a client obey deadlines, as the README recommends.
func obedient(o *redis.Options) { o.ContextTimeoutEnabled = true }
