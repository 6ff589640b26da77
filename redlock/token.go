package redlock

import (
	"context"
	"errors"
	"time"

	"github.com/seed-b640e7e9/lock"
)

// token is what is under way for a token at nodes where it may appear yet. As long as that is so, a release there is not
// the end: what comes after it has to be released again.
type token struct {
	taking [maxNodes]uint8   // calls that may set the key
	doubts map[int]time.Time // when what comes of such a call without an answer ends, by node
	ended  *vote             // the release; nil before that
	waits  set               // nodes where it has to wait for such calls
}

func (q *quorum) tokenLocked(name string) *token {
	t := q.tokens[name]
	if t == nil {
		t = &token{}
		q.tokens[name] = t
	}
	return t
}

// dropLocked forgets the token if nothing more can come of it.
func (q *quorum) dropLocked(name string, t *token) {
	if t.taking == [maxNodes]uint8{} && (len(t.doubts) == 0 || t.ended != nil) && q.tokens[name] == t {
		delete(q.tokens, name)
	}
}

// taking accounts for calls to come that may set the key.
func (q *quorum) taking(name string, nodes set) {
	q.mu.Lock()
	defer q.mu.Unlock()
	t := q.tokenLocked(name)
	for i := range q.nodes {
		if nodes.has(i) {
			t.taking[i]++
		}
	}
}

// took accounts for the end of such a call. If the release waits for it, it goes on there.
func (q *quorum) took(r *lock.Request, i int, err error) {
	unknown := errors.Is(err, lock.ErrUnknown)
	until := time.Now().Add(r.TTL)
	q.mu.Lock()
	t := q.tokens[r.Token]
	t.taking[i]--
	if unknown {
		q.doubtLocked(r.Token, t, i, until)
	}
	var ended *vote
	if t.waits.has(i) && t.taking[i] == 0 {
		t.waits.remove(i)
		ended = t.ended
	}
	q.dropLocked(r.Token, t)
	q.mu.Unlock()
	if ended == nil {
		return
	}
	if unknown {
		ended.doubt(i, until)
	}
	ended.call(i)
}

// doubtLocked remembers a call without an answer, for as long as something may come of it.
func (q *quorum) doubtLocked(name string, t *token, i int, until time.Time) {
	if t.doubts == nil {
		t.doubts = map[int]time.Time{}
	}
	t.doubts[i] = until
	time.AfterFunc(time.Until(until), func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		if t.doubts[i] == until {
			delete(t.doubts, i)
			q.dropLocked(name, t)
		}
	})
}

// install gives the token back to a node that has lost it, in the background: unless another has the key there by now,
// or the lease is given up. It looks whether it is with q.mu locked, as the release does that follows.
func (q *quorum) install(r lock.Request, i int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if r.Live != nil && !r.Live() {
		return
	}
	t := q.tokenLocked(r.Token)
	if t.ended != nil || t.taking[i] > 0 {
		q.dropLocked(r.Token, t)
		return
	}
	t.taking[i]++
	q.countLocked(1)
	go func() {
		defer q.count(-1)
		r.Again, r.Fence, r.Count, r.Limit = true, lock.FenceOff, 0, patience(r.TTL)
		n, err := q.nodes[i], errBusy
		if n.enter() {
			_, err = n.Acquire(context.Background(), r)
			n.leave(err)
		}
		q.took(&r, i, err)
	}()
}

// release ends the token at nodes. Where it may be about to appear this waits for that; where it may appear later, the
// node is released again and again. It takes need of them to agree.
func (q *quorum) release(ctx context.Context, r lock.Request, nodes set, need int) *vote {
	v := q.open(ctx, giving, r, nodes)
	v.need = need
	q.mu.Lock()
	var waits set
	if t := q.tokens[r.Token]; t != nil && t.ended == nil {
		for i := range q.nodes {
			if nodes.has(i) && t.taking[i] > 0 {
				waits.add(i)
			}
		}
		t.ended, t.waits, v.doubts = v, waits, t.doubts
		t.doubts = nil
		q.dropLocked(r.Token, t)
	}
	q.mu.Unlock()
	v.start(nodes &^ waits)
	return v
}

// doubt tells a release that the key may yet come to a node.
func (v *vote) doubt(i int, until time.Time) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.doubts == nil {
		v.doubts = map[int]time.Time{}
	}
	v.doubts[i] = until
}

// gave sees to it that a node is released again if it has failed, or if the key may come yet.
func (v *vote) gave(i int, err error) {
	v.mu.Lock()
	doubt, mayCome := v.doubts[i]
	v.mu.Unlock()
	until := time.Now().Add(v.req.TTL)
	switch {
	case mayCome:
		if doubt.After(until) {
			until = doubt
		}
	case err == nil, errors.Is(err, lock.ErrLost), lock.IsPermanent(err):
		return
	}
	v.q.nodes[i].clear(v.req, until, mayCome)
}
