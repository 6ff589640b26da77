package wake_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/seed-b640e7e9/lock/internal/redistest"
	"github.com/seed-b640e7e9/lock/internal/wake"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a server behind a proxy, and a Hub.
type world struct {
	proxy  *redistest.Proxy
	direct *redis.Client
	hub    *wake.Hub
}

func inVirtualTime(t *testing.T, f func(t *testing.T, w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		m := redistest.Mini(t)
		p := redistest.ProxyMini(t, m)
		w := &world{proxy: p, direct: redistest.MiniClient(t, m), hub: wake.New(p.Client(t))}
		t.Cleanup(func() { require.NoError(t, w.hub.Wait(context.Background())) })
		f(t, w)
	})
}

// listen counts wake-ups.
func (w *world) listen(t *testing.T, name string) (woken *int, stop func()) {
	t.Helper()
	woken = new(int)
	stop, err := w.hub.Listen(t.Context(), name, func(string) { *woken++ })
	require.NoError(t, err)
	return woken, stop
}

func (w *world) publish(t *testing.T, name string) int64 {
	t.Helper()
	n, err := w.direct.Publish(t.Context(), name, "").Result()
	require.NoError(t, err)
	synctest.Wait()
	return n
}

func TestListenersHearTheirChannelUntilTheyStop(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		a, stopA := w.listen(t, "a")
		again, stopAgain := w.listen(t, "a")
		b, stopB := w.listen(t, "b")
		require.EqualValues(t, 1, w.publish(t, "a"), "one connection, whoever listens")
		require.Equal(t, []int{1, 1, 0}, []int{*a, *again, *b})
		stopA()
		stopA()
		w.publish(t, "a")
		require.Equal(t, []int{1, 2, 0}, []int{*a, *again, *b})
		stopAgain()
		synctest.Wait()
		require.Zero(t, w.publish(t, "a"), "it is unsubscribed")
		w.publish(t, "b")
		require.Equal(t, 1, *b)
		stopB()
	})
}

func TestStoppingAndListeningAgainAtOnce(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		_, stop := w.listen(t, "a")
		for range 100 {
			stop()
			var woken *int
			woken, stop = w.listen(t, "a")
			w.publish(t, "a")
			require.Equal(t, 1, *woken)
		}
		stop()
	})
}

func TestABrokenConnectionIsReplacedAndListenersAreWoken(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		a, stopA := w.listen(t, "a")
		b, stopB := w.listen(t, "b")
		w.proxy.RefuseAll()
		w.proxy.Cut()
		time.Sleep(30 * time.Second)
		synctest.Wait()
		require.Zero(t, *a)
		dials := w.proxy.Count(redistest.Cmd("HELLO"))
		w.proxy.Heal()
		time.Sleep(3 * time.Second)
		synctest.Wait()
		require.Equal(t, []int{1, 1}, []int{*a, *b}, "something may have been missed")
		require.LessOrEqual(t, w.proxy.Count(redistest.Cmd("HELLO")), dials+1)
		require.EqualValues(t, 1, w.publish(t, "a"))
		require.Equal(t, 2, *a)
		stopA()
		stopB()
	})
}

func TestAConnectionThatIsHalfDeadIsReplaced(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		a, stop := w.listen(t, "a")
		w.proxy.Silence()
		time.Sleep(25 * time.Second) // a ping, and another
		w.proxy.Heal()
		time.Sleep(10 * time.Second)
		synctest.Wait()
		require.Positive(t, *a)
		*a = 0
		require.EqualValues(t, 1, w.publish(t, "a"))
		require.Equal(t, 1, *a)
		stop()
	})
}

func TestListenEndsWithItsContextAndWithTheServersNo(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		w.proxy.Silence()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		_, err := w.hub.Listen(ctx, "a", func(string) {})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, time.Second, time.Since(start))
		w.proxy.Heal()
		time.Sleep(10 * time.Second)

		w.proxy.RefuseAll()
		_, err = w.hub.Listen(t.Context(), "a", func(string) {})
		require.Error(t, err)
		require.NotErrorIs(t, err, errors.ErrUnsupported, "it may help to ask again")
		w.proxy.Heal()

		w.proxy.On(redistest.Cmd("SUBSCRIBE"), redistest.ReplyError("NOPERM this user has no permissions"))
		for range 2 {
			_, err = w.hub.Listen(t.Context(), "a", func(string) {})
			require.ErrorIs(t, err, errors.ErrUnsupported)
			require.ErrorContains(t, err, "NOPERM")
		}
		require.Equal(t, 1, w.proxy.Count(redistest.Cmd("SUBSCRIBE")))
	})
}

func TestTheConnectionIsClosedSoonAfterTheLastListener(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		for i := range 3 {
			_, stop := w.listen(t, "a")
			stop()
			if i < 2 {
				time.Sleep(500 * time.Millisecond) // not long enough
			}
		}
		require.Equal(t, 3, w.proxy.Count(redistest.Cmd("SUBSCRIBE")))
		require.Equal(t, 2, w.proxy.Count(redistest.Cmd("HELLO")), "one for the server that has no sharded pub/sub, and one")
		time.Sleep(2 * time.Second)
		_, stop := w.listen(t, "a")
		require.Equal(t, 3, w.proxy.Count(redistest.Cmd("HELLO")))
		stop()
		start := time.Now()
		require.NoError(t, w.hub.Wait(t.Context()), "which waits for no lingering")
		require.Zero(t, time.Since(start))
	})
}
