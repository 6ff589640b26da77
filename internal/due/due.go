// Package due calls back when the time of an item has come. It owns no goroutine: between two calls there is one
// pending timer, so an idle queue costs nothing and can't be leaked.
package due

import (
	"container/heap"
	"math"
	"sync"
	"time"
)

// Item is an entry of a Queue. It is embedded in, or belongs to, whatever is to be done; its zero value is in no queue.
type Item[T any] struct {
	Value T
	index int // position in the heap plus one; 0 while out of the queue
}

// Queue hands out items when they are due. It is safe for concurrent use.
type Queue[T any] struct {
	fire  func([]T)
	slack time.Duration
	began time.Time // instants are counted from then

	mu      sync.Mutex // guards all below, and the items
	entries entries[T]
	timer   *time.Timer
	set     bool          // the timer is
	armed   time.Duration // when it goes off, if it is set
}

// New returns a Queue that calls fire, in a goroutine of its own, with all items that are due within slack from now:
// none is handed out late for the sake of company, some a little early. Calls may overlap.
func New[T any](slack time.Duration, fire func([]T)) *Queue[T] {
	return &Queue[T]{slack: slack, fire: fire, began: time.Now()}
}

// Put makes it due at the given time, whether or not it was in the queue before.
func (q *Queue[T]) Put(it *Item[T], at time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if it.index == 0 {
		heap.Push(&q.entries, it)
	}
	q.entries[it.index-1].at = at.Sub(q.began)
	heap.Fix(&q.entries, it.index-1)
	q.armLocked()
}

// Remove takes the item out. It does nothing if the item is not in the queue, for example because it was handed out.
func (q *Queue[T]) Remove(it *Item[T]) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if it.index > 0 {
		heap.Remove(&q.entries, it.index-1)
	}
}

// armLocked sets the timer for the first item, unless it goes off by then anyway: one that goes off for nothing is
// cheaper than one that is set again with each short-lived item.
func (q *Queue[T]) armLocked() {
	if len(q.entries) == 0 {
		return
	}
	first := q.entries[0].at
	if q.set && q.armed <= first {
		return
	}
	q.set, q.armed = true, first
	if q.timer == nil {
		q.timer = time.AfterFunc(first-time.Since(q.began), q.run)
		return
	}
	q.timer.Reset(first - time.Since(q.began))
}

func (q *Queue[T]) run() {
	if ready := q.take(time.Since(q.began)); len(ready) > 0 {
		q.fire(ready)
	}
}

func (q *Queue[T]) take(now time.Duration) []T {
	q.mu.Lock()
	defer q.mu.Unlock()
	var ready []T
	for len(q.entries) > 0 && q.entries[0].at <= now+q.slack {
		ready = append(ready, heap.Remove(&q.entries, 0).(*Item[T]).Value)
	}
	q.set = false
	q.armLocked()
	return ready
}

// entry is an item's place in the heap. The time is beside the pointer and not behind it: in a long queue that is most
// of what an operation costs.
type entry[T any] struct {
	at   time.Duration
	item *Item[T]
}

// entries is the heap, earliest first.
type entries[T any] []entry[T]

func (h entries[T]) Len() int           { return len(h) }
func (h entries[T]) Less(i, j int) bool { return h[i].at < h[j].at }

func (h entries[T]) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].item.index, h[j].item.index = i+1, j+1
}

// Push puts an item last; its time is set afterwards, as an entry would have to be allocated.
func (h *entries[T]) Push(x any) {
	it := x.(*Item[T])
	*h = append(*h, entry[T]{math.MaxInt64, it})
	it.index = len(*h)
}

func (h *entries[T]) Pop() any {
	last := len(*h) - 1
	it := (*h)[last].item
	(*h)[last] = entry[T]{}
	*h = (*h)[:last]
	it.index = 0
	return it
}
