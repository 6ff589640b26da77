package due_test

import (
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock/internal/due"
)

func TestItemsAreHandedOutWhenTheyAreDue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var mu sync.Mutex
		got := map[int]time.Duration{}
		q := due.New(0, func(ns []int) {
			mu.Lock()
			defer mu.Unlock()
			for _, n := range ns {
				got[n] = time.Since(start)
			}
		})
		items := make([]due.Item[int], 100)
		for _, n := range rand.Perm(len(items)) {
			items[n].Value = n
			q.Put(&items[n], start.Add(time.Duration(n)*time.Second))
		}
		q.Remove(&items[7])
		q.Remove(&items[7])
		q.Put(&items[5], start.Add(500*time.Second)) // later
		q.Put(&items[90], start.Add(3*time.Second))  // earlier
		time.Sleep(1000 * time.Second)
		synctest.Wait()
		require.Len(t, got, 99)
		for n, at := range got {
			want := map[int]int{5: 500, 90: 3}[n]
			if want == 0 {
				want = n
			}
			require.Equal(t, time.Duration(want)*time.Second, at, n)
		}
	})
}

func TestSlackBringsNeighboursTogetherAndNeverLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var mu sync.Mutex
		var batches [][]int
		q := due.New(10*time.Millisecond, func(ns []int) {
			mu.Lock()
			defer mu.Unlock()
			require.LessOrEqual(t, time.Since(start), time.Duration(ns[0])*time.Millisecond)
			batches = append(batches, ns)
		})
		items := make([]due.Item[int], 100)
		for n := range items {
			items[n].Value = n
			q.Put(&items[n], start.Add(time.Duration(n)*time.Millisecond))
		}
		time.Sleep(time.Second)
		synctest.Wait()
		require.Less(t, len(batches), 15)
	})
}

func TestAShortLivedItemLeavesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := due.New(0, func([]int) { t.Error("handed out") })
		var it due.Item[int]
		for range 1000 {
			q.Put(&it, time.Now().Add(time.Minute))
			q.Remove(&it)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
	})
}
