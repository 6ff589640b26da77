// Package sweep repeats clean-up tasks until they are done or their time is over. Pauses grow, few tasks run at once,
// and nothing is left running in between.
package sweep

import (
	"context"
	"sync"
	"time"

	"github.com/seed-b640e7e9/lock/internal/due"
)

const (
	firstPause = 50 * time.Millisecond
	maxPause   = 2 * time.Second
)

// Task is one thing to clean up.
type Task struct {
	// Do makes one try, ends when ctx does, and tells whether nothing is left to do.
	Do func(ctx context.Context) (done bool)
	// Until is when trying ends: one is made close to it, and none that had to wait for others begins after it.
	Until time.Time
}

// Sweeper runs tasks. It is safe for concurrent use.
type Sweeper struct {
	limit int
	each  time.Duration
	queue *due.Queue[*job]

	mu      sync.Mutex // guards all below
	running int
	ready   []*job        // due, but limit tasks are running
	left    int           // tasks that are not finished
	idle    chan struct{} // closed when left becomes 0; nil while nobody waits for that
}

type job struct {
	Task
	pause time.Duration
	due.Item[*job]
}

// New returns a Sweeper that runs at most limit tasks at a time and gives each try the time in each.
func New(limit int, each time.Duration) *Sweeper {
	s := &Sweeper{limit: limit, each: each}
	s.queue = due.New(0, s.start)
	return s
}

// Add makes the first try of t at once, in the background.
func (s *Sweeper) Add(t Task) {
	j := &job{Task: t, pause: firstPause}
	j.Value = j
	s.mu.Lock()
	s.left++
	s.mu.Unlock()
	s.start([]*job{j})
}

// start runs jobs, as many as the limit allows, each in its own goroutine; the others wait for a free place.
func (s *Sweeper) start(jobs []*job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, j := range jobs {
		if s.running >= s.limit {
			s.ready = append(s.ready, j)
			continue
		}
		s.running++
		go s.work(j)
	}
}

// work runs j and then whatever has become due meanwhile.
func (s *Sweeper) work(j *job) {
	for j != nil {
		done := s.try(j)
		if !done {
			s.again(j)
		}
		j = s.next(done)
	}
}

func (s *Sweeper) try(j *job) (done bool) {
	ctx, cancel := context.WithTimeout(context.Background(), s.each)
	defer cancel()
	return j.Do(ctx) || !time.Now().Before(j.Until)
}

// again plans the next try: after a pause that grows, but not after the task's time.
func (s *Sweeper) again(j *job) {
	at := time.Now().Add(j.pause)
	if at.After(j.Until) {
		at = j.Until
	}
	j.pause = min(2*j.pause, maxPause)
	s.queue.Put(&j.Item, at)
}

// next accounts for a finished try and returns the next job for the same goroutine, if any. Those whose time is over
// are done.
func (s *Sweeper) next(done bool) *job {
	s.mu.Lock()
	defer s.mu.Unlock()
	if done {
		s.doneLocked()
	}
	for len(s.ready) > 0 {
		j := s.ready[0]
		s.ready[0] = nil
		s.ready = s.ready[1:]
		if time.Now().Before(j.Until) {
			return j
		}
		s.doneLocked()
	}
	s.running--
	return nil
}

func (s *Sweeper) doneLocked() {
	s.left--
	if s.left == 0 && s.idle != nil {
		close(s.idle)
		s.idle = nil
	}
}

// Left returns how many tasks are not finished.
func (s *Sweeper) Left() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.left
}

// Wait returns nil when no task is left, or ctx's error.
func (s *Sweeper) Wait(ctx context.Context) error {
	for {
		s.mu.Lock()
		if s.left == 0 {
			s.mu.Unlock()
			return nil
		}
		if s.idle == nil {
			s.idle = make(chan struct{})
		}
		idle := s.idle
		s.mu.Unlock()
		select {
		case <-idle:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
