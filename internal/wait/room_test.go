package wait_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock/internal/wait"
)

func TestTurnsAreTakenInOrder(t *testing.T) {
	var r wait.Room[int, string]
	first, _ := r.Enter("k", 0)
	require.Nil(t, first, "nobody has the turn")
	r.Show("k", "shown")
	_, free := r.TryEnter("k")
	require.False(t, free)
	var ws []*wait.Waiter[int, string]
	for i := range 5 {
		w, shown := r.Enter("k", i)
		require.Equal(t, "shown", shown)
		ws = append(ws, w)
	}
	require.Equal(t, 5, r.Waiting("k"))
	for i, w := range ws {
		require.True(t, r.Pass("k", fmt.Sprint(i)))
		got, mine := w.Wait(t.Context())
		require.True(t, mine)
		require.Equal(t, fmt.Sprint(i), got)
	}
	require.False(t, r.Pass("k", ""), "nobody is in line")
	_, free = r.TryEnter("k")
	require.True(t, free, "so the turn has ended")
}

func TestNextAsksWhetherTheFirstWillDo(t *testing.T) {
	var r wait.Room[int, string]
	r.Enter("k", 0)
	w, _ := r.Enter("k", 7)
	require.Nil(t, r.Next("k", func(kind int) bool { return kind != 7 }))
	require.Equal(t, 1, r.Waiting("k"), "it stays in line")
	require.Same(t, w, r.Next("k", func(kind int) bool { return kind == 7 }))
	require.Nil(t, r.Next("k", func(int) bool { return true }), "nobody is left")
	w.Give("turn")
	got, mine := w.Wait(t.Context())
	require.True(t, mine)
	require.Equal(t, "turn", got)
}

func TestWhoLeavesTheLineGetsWhatIsShown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r wait.Room[int, string]
		r.Enter("k", 0)
		r.Show("k", "shown")
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		w, _ := r.Enter("k", 0)
		shown, mine := w.Wait(ctx)
		require.False(t, mine)
		require.Equal(t, "shown", shown)
		require.Zero(t, r.Waiting("k"))
	})
}

// Many goroutines, of which many give up at random moments, pass one turn around: it is never lost and never doubled.
func TestTheTurnIsNeitherLostNorDoubled(t *testing.T) {
	var r wait.Room[int, int]
	var wg sync.WaitGroup
	var inside, served atomic.Int64
	for range 32 {
		wg.Go(func() {
			for range 500 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rand.N(200))*time.Microsecond)
				w, _ := r.Enter("k", 0)
				mine := true
				if w != nil {
					_, mine = w.Wait(ctx)
				}
				if mine {
					if inside.Add(1) != 1 {
						t.Error("two have the turn")
					}
					served.Add(1)
					inside.Add(-1)
					if next := r.Next("k", func(int) bool { return rand.N(2) == 0 }); next != nil {
						next.Give(0)
					} else {
						r.Pass("k", 0)
					}
				}
				cancel()
			}
		})
	}
	wg.Wait()
	require.Positive(t, served.Load())
	_, free := r.TryEnter("k")
	require.True(t, free)
}

func TestKeysUsedOnceLeaveNothing(t *testing.T) {
	var r wait.Room[int, string]
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	use := func(n int) {
		for i := range n {
			key := fmt.Sprint("key", n, i)
			r.Enter(key, 0)
			r.Pass(key, "")
		}
	}
	use(1000)
	before := heap()
	use(1_000_000)
	require.Less(t, heap(), before+1<<20)
	runtime.KeepAlive(&r)
}
