package main

import (
	"context"
	"sync"
	"time"

	"github.com/seed-b640e7e9/lock"
)

// lateStore tells how late renewals are sent: after a third of the TTL since the last confirmed send.
type lateStore struct {
	lock.Store
	third time.Duration

	mu   sync.Mutex
	sent map[string]time.Time // by token
	late []time.Duration
}

// Acquire notes when the lease began.
func (s *lateStore) Acquire(ctx context.Context, r lock.Request) (lock.Reply, error) {
	sent := time.Now()
	reply, err := s.Store.Acquire(ctx, r)
	if err == nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.sent == nil {
			s.sent = map[string]time.Time{}
		}
		s.sent[r.Token] = sent
	}
	return reply, err
}

// Renew notes how late it is, and when it was confirmed.
func (s *lateStore) Renew(ctx context.Context, rs []lock.Request, done func(i int, r lock.Reply, err error)) {
	sent := time.Now()
	s.mu.Lock()
	for _, r := range rs {
		if last, ok := s.sent[r.Token]; ok {
			s.late = append(s.late, max(sent.Sub(last)-s.third, 0))
		}
	}
	s.mu.Unlock()
	s.Store.Renew(ctx, rs, func(i int, r lock.Reply, err error) {
		if err == nil {
			s.mu.Lock()
			s.sent[rs[i].Token] = sent
			s.mu.Unlock()
		}
		done(i, r, err)
	})
}
