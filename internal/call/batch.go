package call

import (
	"context"
	"math"
	"runtime"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// Batcher sends the commands of many goroutines. While there are few of them each command is sent by itself, in its
// caller's goroutine, which is the quickest way. Beyond that they share round trips: who comes while others are under way
// gets into the next pipeline, which leaves as soon as one is back. So the cost of a command falls as the load grows.
//
// Commands for a cluster are always sent by themselves: a pipeline over several shards returns only when the slowest has
// answered.
type Batcher struct {
	Client
	few int // commands under way that are sent by themselves

	mu      sync.Mutex // guards all below
	busy    int        // commands under way
	queue   []*rider
	senders int // pipelines under way
}

const (
	maxBatch   = 256
	maxSenders = 4                    // a client has ten connections for pipelines, and renewals need some
	patience   = 2 * time.Millisecond // how long one pipeline may take before another leaves
)

// rider is a command that shares a pipeline.
type rider struct {
	m     *Message
	limit time.Duration
	done  chan error // gets the outcome
	gone  bool       // it has been taken by a sender; guarded by the Batcher
}

// NewBatcher returns a Batcher that sends through c.
func NewBatcher(c Client) *Batcher {
	b := &Batcher{Client: c, few: math.MaxInt}
	if _, single := c.rdb.(interface{ Options() *redis.Options }); single {
		b.few = 2 * runtime.GOMAXPROCS(0)
	}
	return b
}

// Process is Client's, but the command may be sent together with others. Then a cancellation is obeyed at once, and
// within grace if the command has been sent.
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
	r := &rider{m: m, limit: limit, done: make(chan error, 1)}
	b.add(r)
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case err := <-r.done:
		return endOf(ctx, err)
	case <-timer.C:
		return &Abandoned{cause: errLimit(limit), unsent: b.withdraw(r)}
	case <-ctx.Done():
		if b.withdraw(r) {
			return &Abandoned{cause: ContextError(ctx), unsent: true}
		}
		timer.Reset(grace)
	}
	select {
	case err := <-r.done:
		return endOf(ctx, err)
	case <-timer.C:
		return &Abandoned{cause: ContextError(ctx)}
	}
}

// add puts r into the queue, and sees to it that somebody sends it.
func (b *Batcher) add(r *rider) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.queue = append(b.queue, r)
	if b.senders == 0 {
		b.senders++
		go b.send()
	}
}

// withdraw tells whether nobody has taken r yet. Then nobody will.
func (b *Batcher) withdraw(r *rider) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if r.gone {
		return false
	}
	r.gone = true
	return true
}

// help has another pipeline sent, if commands wait for one that does not come back: it may never do.
func (b *Batcher) help() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.queue) > 0 && b.senders < maxSenders {
		b.senders++
		go b.send()
	}
}

// send sends what is in the queue, until it is empty.
func (b *Batcher) send() {
	for {
		runtime.Gosched() // those who have just got an answer may have more to send
		batch := b.take()
		if len(batch) == 0 {
			return
		}
		late := time.AfterFunc(patience, b.help)
		b.sendTogether(batch)
		late.Stop()
	}
}

// take takes commands out of the queue. If there is none the sender is done.
func (b *Batcher) take() (batch []*rider) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for len(b.queue) > 0 && len(batch) < maxBatch {
		if r := b.queue[0]; !r.gone {
			r.gone = true
			batch = append(batch, r)
		}
		b.queue = b.queue[1:]
	}
	if len(batch) == 0 {
		b.senders--
	}
	return batch
}

// sendTogether sends a batch in one round trip.
func (b *Batcher) sendTogether(batch []*rider) {
	var limit time.Duration
	for _, r := range batch {
		limit = max(limit, r.limit)
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	pipe := b.rdb.Pipeline()
	for _, r := range batch {
		_ = pipe.Process(ctx, r.m) // only queues
	}
	_, whole := pipe.Exec(ctx)
	for _, r := range batch {
		err := r.m.Err()
		if whole != nil && !r.m.read {
			err = &Abandoned{cause: whole, unsent: true}
		}
		r.done <- err
	}
}
