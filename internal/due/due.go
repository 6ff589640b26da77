// Package due calls back when the time of an item has come. It owns no goroutine: between two calls there is one
// pending timer, so an idle queue costs nothing and can't be leaked.
package due

import (
	"container/heap"
	"sync"
	"time"
)

// Item is an entry of a Queue. It is embedded in, or belongs to, whatever is to be done; its zero value is in no queue.
type Item[T any] struct {
	Value T
	at    time.Time
	index int // position in the heap plus one; 0 while out of the queue
}

// Queue hands out items when they are due. It is safe for concurrent use.
type Queue[T any] struct {
	fire  func([]T)
	slack time.Duration

	mu    sync.Mutex // guards all below, and the items
	items items[T]
	timer *time.Timer
	armed time.Time // when the timer is set to go off; zero while it is not set
}

// New returns a Queue that calls fire, in a goroutine of its own, with all items that are due within slack from now:
// none is handed out late for the sake of company, some a little early. Calls may overlap.
func New[T any](slack time.Duration, fire func([]T)) *Queue[T] {
	return &Queue[T]{slack: slack, fire: fire}
}

// Put makes it due at the given time, whether or not it was in the queue before.
func (q *Queue[T]) Put(it *Item[T], at time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	it.at = at
	if it.index > 0 {
		heap.Fix(&q.items, it.index-1)
	} else {
		heap.Push(&q.items, it)
	}
	q.armLocked()
}

// Remove takes the item out. It does nothing if the item is not in the queue, for example because it was handed out.
func (q *Queue[T]) Remove(it *Item[T]) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if it.index > 0 {
		heap.Remove(&q.items, it.index-1)
	}
}

// armLocked sets the timer for the first item, unless it goes off by then anyway: one that goes off for nothing is
// cheaper than one that is set again with each short-lived item.
func (q *Queue[T]) armLocked() {
	if len(q.items) == 0 {
		return
	}
	first := q.items[0].at
	if !q.armed.IsZero() && !q.armed.After(first) {
		return
	}
	q.armed = first
	if q.timer == nil {
		q.timer = time.AfterFunc(time.Until(first), q.run)
		return
	}
	q.timer.Reset(time.Until(first))
}

func (q *Queue[T]) run() {
	if ready := q.take(time.Now()); len(ready) > 0 {
		q.fire(ready)
	}
}

func (q *Queue[T]) take(now time.Time) []T {
	q.mu.Lock()
	defer q.mu.Unlock()
	var ready []T
	for len(q.items) > 0 && !q.items[0].at.After(now.Add(q.slack)) {
		ready = append(ready, heap.Pop(&q.items).(*Item[T]).Value)
	}
	q.armed = time.Time{}
	q.armLocked()
	return ready
}

// items is the heap, earliest first.
type items[T any] []*Item[T]

func (h items[T]) Len() int           { return len(h) }
func (h items[T]) Less(i, j int) bool { return h[i].at.Before(h[j].at) }

func (h items[T]) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i+1, j+1
}

func (h *items[T]) Push(x any) {
	it := x.(*Item[T])
	*h = append(*h, it)
	it.index = len(*h)
}

func (h *items[T]) Pop() any {
	old := *h
	it := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	it.index = 0
	return it
}
