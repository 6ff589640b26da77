package call

import (
	"container/list"
	"context"
	"errors"
	"math"
	"runtime"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// Batcher sends the commands of many goroutines. While there are few of them each command is sent by itself, in its
// caller's goroutine, which is the quickest way. Beyond that they share round trips: who comes while others are under way
// gets into the next pipeline, which leaves when the one before is back, or takes its time. So the cost of a command falls
// as the load grows.
//
// Commands for a cluster are always sent by themselves: a pipeline over several shards returns only when the slowest has
// answered.
type Batcher struct {
	Client
	few int // commands under way that are sent by themselves

	mu    sync.Mutex // guards all below, and flights
	busy  int        // commands under way
	queue list.List  // of riders
	gate  bool       // closed: a pipeline is about to leave, or has just left
	late  int        // pipelines that take their time, and are waited for
}

const (
	maxBatch = 256
	maxLate  = 3                    // a client has ten connections for pipelines, and renewals need some
	patience = 2 * time.Millisecond // how long the next pipeline waits for the one before
)

// rider is a command that shares a pipeline.
type rider struct {
	ctx    context.Context
	m      *Message
	limit  time.Duration
	place  *list.Element // in the queue; nil if it is in there no more
	flight *flight       // nil before
	done   chan landing
}

// landing is how a command has ended: with an error, or a hook's panic.
type landing struct {
	err      error
	panicked any
}

// flight is a pipeline.
type flight struct {
	riders  []*rider
	cancel  context.CancelFunc
	waiting int  // riders who have not left
	gated   bool // the next waits for it
	late    bool // it is one of Batcher.late

	whole error // what the pipeline returned; not guarded
	back  bool  // it has returned; the same
}

// NewBatcher returns a Batcher that sends through c.
func NewBatcher(c Client) *Batcher {
	b := &Batcher{Client: c, few: math.MaxInt}
	if _, single := c.rdb.(interface{ Options() *redis.Options }); single {
		b.few = 2 * runtime.GOMAXPROCS(0)
	}
	return b
}

// Process is Client's, but the command may be sent together with others; hooks then see the values of the context of one
// of them. There a cancellation is obeyed within grace, on any client.
func (b *Batcher) Process(ctx context.Context, m *Message, limit time.Duration) error {
	alone := b.alone()
	defer b.end()
	switch {
	case alone:
		return b.Client.Process(ctx, m, limit)
	case ctx.Err() != nil:
		return &Abandoned{cause: ContextError(ctx), unsent: true}
	case limit == 0:
		limit = Limit
	}
	return b.ride(ctx, m, limit)
}

// alone begins a command, and tells whether it is to be sent by itself.
func (b *Batcher) alone() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.busy++
	return b.busy <= b.few
}

func (b *Batcher) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.busy--
}

// ride waits until m has been answered in a pipeline, or ctx or the limit ends.
func (b *Batcher) ride(ctx context.Context, m *Message, limit time.Duration) error {
	m.read = false
	r := &rider{ctx: ctx, m: m, limit: limit, done: make(chan landing, 1)}
	b.enter(r)
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case l := <-r.done:
		return r.landed(l)
	case <-timer.C:
		if b.withdraw(r) {
			return &Abandoned{cause: errLimit(limit), unsent: true}
		}
		b.leave(r)
		return &Abandoned{cause: errLimit(limit)}
	case <-ctx.Done():
		if b.withdraw(r) {
			return &Abandoned{cause: ContextError(ctx), unsent: true}
		}
		timer.Reset(grace)
	}
	select {
	case l := <-r.done:
		return r.landed(l)
	case <-timer.C:
		b.leave(r)
		return &Abandoned{cause: ContextError(ctx)}
	}
}

// landed is what a command returns that has ended. A hook's panic goes on where it would if the command were alone.
func (r *rider) landed(l landing) error {
	if l.panicked != nil {
		panic(l.panicked)
	}
	err := endOf(r.ctx, l.err)
	if errors.Is(err, context.DeadlineExceeded) && r.ctx.Err() == nil {
		err = &Abandoned{cause: errLimit(r.limit), unsent: !r.m.read} // it was the pipeline's deadline
	}
	return err
}

// enter puts r into the queue.
func (b *Batcher) enter(r *rider) {
	b.mu.Lock()
	defer b.mu.Unlock()
	r.place = b.queue.PushBack(r)
	b.goLocked()
}

// withdraw takes r out of the queue, or returns false if it is on its way.
func (b *Batcher) withdraw(r *rider) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if r.place == nil {
		return false
	}
	b.queue.Remove(r.place)
	r.place = nil
	return true
}

// leave gives up one who is on the way. A pipeline that nobody waits for any more is not sent if it was not yet, and is in
// nobody's way.
func (b *Batcher) leave(r *rider) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f := r.flight
	f.waiting--
	if f.waiting > 0 {
		return
	}
	f.cancel()
	b.doneLocked(f)
}

// doneLocked takes a late flight out of the count.
func (b *Batcher) doneLocked(f *flight) {
	if f.late {
		f.late = false
		b.late--
		b.goLocked()
	}
}

// goLocked has the queue sent, if it is time to.
func (b *Batcher) goLocked() {
	if b.queue.Len() > 0 && !b.gate && b.late < maxLate {
		b.gate = true
		go b.fly()
	}
}

// fly sends one pipeline.
func (b *Batcher) fly() {
	runtime.Gosched() // those who have just got an answer may have more to send
	ctx, f := b.board()
	if f == nil {
		return
	}
	defer b.land(f) // also if a hook panics
	defer time.AfterFunc(patience, func() { b.delay(f) }).Stop()
	pipe := b.rdb.Pipeline()
	for _, r := range f.riders {
		_ = pipe.Process(ctx, r.m) // only queues
	}
	_, f.whole = pipe.Exec(ctx)
	f.back = true
}

// board takes commands out of the queue. If there are none the gate is opened.
func (b *Batcher) board() (context.Context, *flight) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f := &flight{gated: true}
	var limit time.Duration
	for b.queue.Len() > 0 && len(f.riders) < maxBatch {
		r := b.queue.Remove(b.queue.Front()).(*rider)
		r.place, r.flight = nil, f
		f.riders = append(f.riders, r)
		limit = max(limit, r.limit)
	}
	f.waiting = len(f.riders)
	if f.waiting == 0 {
		b.gate = false
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(f.riders[0].ctx), limit)
	f.cancel = cancel
	return ctx, f
}

// delay opens the gate behind a flight that takes its time: it may never come back.
func (b *Batcher) delay(f *flight) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !f.gated {
		return
	}
	f.gated, b.gate = false, false
	if f.waiting > 0 {
		f.late = true
		b.late++
	}
	b.goLocked()
}

// land tells everybody how it has ended.
func (b *Batcher) land(f *flight) {
	panicked := recover()
	f.cancel()
	refused := f.refused()
	for _, r := range f.riders {
		r.done <- landing{r.outcome(f, refused), panicked}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.doneLocked(f)
	if f.gated {
		f.gated, b.gate = false, false
		b.goLocked()
	}
}

// refused tells whether the server has refused the connection: then go-redis tells it of the whole alone.
func (f *flight) refused() bool {
	if f.whole == nil {
		return false
	}
	for _, r := range f.riders {
		if r.m.Err() != nil {
			return false
		}
	}
	return true
}

// errNoReturn is what is known where a hook has ended the goroutine that sent.
var errNoReturn = errors.New("a hook has ended the goroutine")

func (r *rider) outcome(f *flight, refused bool) error {
	switch {
	case !f.back:
		return &Abandoned{cause: errNoReturn, unsent: !r.m.read}
	case refused, f.whole != nil && !r.m.read:
		return &Abandoned{cause: f.whole, unsent: true}
	default:
		return r.m.Err()
	}
}
