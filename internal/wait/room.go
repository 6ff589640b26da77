// Package wait is the waiting room of a process: who waits for a key stands in line, first come first served, and one
// at a time has the turn. It does no I/O. It also decides how long the one who has the turn sleeps between two tries.
package wait

import (
	"context"
	"sync"
)

// Room has a line for each key. Whoever finds no line, or has reached the head of one, has the turn; it is theirs until
// they pass it on. K is what the owner of a turn may ask of those in line, T what is passed on with the turn. A key
// that nobody has the turn for takes no memory. A Room is safe for concurrent use, and its zero value is ready.
type Room[K, T any] struct {
	mu     sync.Mutex // guards all below, the places, and the waiters' links
	places map[string]*place[K, T]
	spare  *place[K, T] // one that is not in use, or nil
}

// place is a key's: what the owner of the turn shows, and the line.
type place[K, T any] struct {
	shown       T
	first, last *Waiter[K, T]
	waiting     int
	kept        bool // nobody has the turn, but who comes next finds what is shown
}

// Waiter is one in line.
type Waiter[K, T any] struct {
	room       *Room[K, T]
	place      *place[K, T]
	kind       K
	prev, next *Waiter[K, T]
	inLine     bool
	given      chan T // gets the turn, once
}

// Enter takes the turn if nobody has it, and returns nil and what was kept with it. Otherwise the caller is in line, and
// gets what the owner shows.
func (r *Room[K, T]) Enter(key string, kind K) (*Waiter[K, T], T) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p, free := r.claim(key)
	if free {
		return nil, p.shown
	}
	w := &Waiter[K, T]{room: r, place: p, kind: kind, prev: p.last, inLine: true, given: make(chan T, 1)}
	if p.last == nil {
		p.first = w
	} else {
		p.last.next = w
	}
	p.last = w
	p.waiting++
	return w, p.shown
}

// TryEnter takes the turn if nobody has it. Otherwise it returns what the owner shows.
func (r *Room[K, T]) TryEnter(key string) (shown T, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p, free := r.claim(key)
	return p.shown, free
}

// claim takes the turn if nobody has it.
func (r *Room[K, T]) claim(key string) (p *place[K, T], free bool) {
	p = r.places[key]
	if p == nil {
		if p, r.spare = r.spare, nil; p == nil {
			p = new(place[K, T])
		}
		r.put(key, p)
		return p, true
	}
	free = p.kept
	p.kept = false
	return p, free
}

func (r *Room[K, T]) put(key string, p *place[K, T]) {
	if r.places == nil {
		r.places = map[string]*place[K, T]{}
	}
	r.places[key] = p
}

// Show sets what those who enter see. Only the owner of the turn may call it.
func (r *Room[K, T]) Show(key string, t T) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.places[key]; p != nil {
		p.shown = t
	}
}

// Waiting returns how many are in line.
func (r *Room[K, T]) Waiting(key string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.places[key]; p != nil {
		return p.waiting
	}
	return 0
}

// Pass gives the turn to the first in line, with t, which is what the others see then. If nobody is in line the turn ends, and
// it returns false: t has gone to nobody. Only the owner of the turn may call it.
func (r *Room[K, T]) Pass(key string, t T) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.pass(key, t) {
		return true
	}
	if p := r.places[key]; p != nil {
		delete(r.places, key)
		*p = place[K, T]{}
		r.spare = p
	}
	return false
}

func (r *Room[K, T]) pass(key string, t T) bool {
	w := r.first(key)
	if w == nil {
		return false
	}
	r.unlink(w)
	w.place.shown = t
	w.Give(t)
	return true
}

// Keep is Pass, but if nobody is in line it keeps t for who comes next, until forget is called. forget is nil if the turn
// was given to somebody.
func (r *Room[K, T]) Keep(key string, t T) (forget func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.pass(key, t) {
		return nil
	}
	p := &place[K, T]{shown: t, kept: true}
	r.put(key, p)
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.places[key] == p && p.kept {
			delete(r.places, key)
		}
	}
}

// Next takes the first in line out of it, if accept says so; else it returns nil, and the turn stays with the caller.
// Otherwise the turn is the returned one's, the others go on to see what they saw, and the caller has to Give. accept is
// called with the room locked. Only the owner of the turn may call it.
func (r *Room[K, T]) Next(key string, accept func(kind K) bool) *Waiter[K, T] {
	r.mu.Lock()
	defer r.mu.Unlock()
	w := r.first(key)
	if w == nil || !accept(w.kind) {
		return nil
	}
	r.unlink(w)
	return w
}

func (r *Room[K, T]) first(key string) *Waiter[K, T] {
	if p := r.places[key]; p != nil {
		return p.first
	}
	return nil
}

func (r *Room[K, T]) unlink(w *Waiter[K, T]) {
	p := w.place
	if w.prev == nil {
		p.first = w.next
	} else {
		w.prev.next = w.next
	}
	if w.next == nil {
		p.last = w.prev
	} else {
		w.next.prev = w.prev
	}
	w.prev, w.next, w.inLine = nil, nil, false
	p.waiting--
}

// Give hands over the turn that Next has promised. It never blocks.
func (w *Waiter[K, T]) Give(t T) { w.given <- t }

// Wait returns what has been passed on, with true: the turn is the caller's, even if ctx has ended meanwhile. If ctx
// ends before, the waiter leaves the line, wherever it stood, and gets what the owner of the turn shows, with false.
func (w *Waiter[K, T]) Wait(ctx context.Context) (T, bool) {
	select {
	case t := <-w.given:
		return t, true
	case <-ctx.Done():
	}
	w.room.mu.Lock()
	if w.inLine {
		shown := w.place.shown
		w.room.unlink(w)
		w.room.mu.Unlock()
		return shown, false
	}
	w.room.mu.Unlock()
	return <-w.given, true // it has been called; what it is given is on its way
}
