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
	taking [maxNodes]uint8 // calls that may set the key
	rounds int             // renewals that may lead to such calls
	doubt  set             // nodes where such a call got no answer, until its TTL is over
	ended  *vote           // the release; nil before that
	waits  set             // nodes where it has to wait for such calls
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
	if t.rounds == 0 && t.taking == [maxNodes]uint8{} && (t.doubt == 0 || t.ended != nil) {
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
	q.mu.Lock()
	t := q.tokens[r.Token]
	t.taking[i]--
	if unknown && !t.doubt.has(i) {
		t.doubt.add(i)
		name := r.Token
		time.AfterFunc(r.TTL, func() { q.certain(name, t, i) })
	}
	there := err == nil || t.doubt.has(i)
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
		ended.doubts(i)
	}
	if there {
		ended.call(i)
	} else {
		ended.answer(i, lock.Reply{}, lock.ErrLost)
	}
}

// certain is called when nothing can come any more of a call that got no answer.
func (q *quorum) certain(name string, t *token, i int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	t.doubt.remove(i)
	if q.tokens[name] == t {
		q.dropLocked(name, t)
	}
}

// round begins a renewal of the token. While it goes on, it is known whether the token has been released.
func (q *quorum) round(name string) *token {
	q.mu.Lock()
	defer q.mu.Unlock()
	t := q.tokenLocked(name)
	t.rounds++
	return t
}

func (q *quorum) endRound(name string, t *token) {
	q.mu.Lock()
	defer q.mu.Unlock()
	t.rounds--
	q.dropLocked(name, t)
}

// install gives the token back to a node that has lost it, in the background: unless another has the key there by now,
// or the token is released.
func (q *quorum) install(r lock.Request, t *token, i int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if t.ended != nil || t.taking[i] > 0 {
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
		t.ended, t.waits, v.doubt = v, waits, t.doubt
		q.dropLocked(r.Token, t)
	}
	q.mu.Unlock()
	v.start(nodes &^ waits)
	return v
}

func (v *vote) doubts(i int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.doubt.add(i)
}

// gave sees to it that a node is released again if it has failed, or if the key may come yet.
func (v *vote) gave(i int, err error) {
	v.mu.Lock()
	mayCome := v.doubt.has(i)
	v.mu.Unlock()
	if err == nil || lock.IsPermanent(err) || errors.Is(err, lock.ErrLost) && !mayCome {
		return
	}
	v.q.nodes[i].clear(v.req, time.Now().Add(v.req.TTL), mayCome)
}
