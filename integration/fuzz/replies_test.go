package fuzz_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock"
)

const (
	leaseTTL = 3 * time.Second
	patience = 2 * time.Second // of those who wait
	steps    = 12              // of a scenario, at most
)

// scenario is what one does with a Locker on a server that lies.
type scenario struct {
	*testing.T
	server *liar
	locker *lock.Locker
	fenced bool
	last   *lock.Lock // the latest one acquired
	failed bool       // a Release of it has ended with an error
	names  int
}

// FuzzNoReplyIsTakenForMoreThanItSays: whatever a server answers, nothing panics, nobody holds a lock that no reply has
// granted, for longer than replies have granted it, and nothing is said to be released, held or lost unless a reply said
// so or the time was over. A bubble sees to it that no goroutine is left.
func FuzzNoReplyIsTakenForMoreThanItSays(f *testing.F) {
	scripts := scriptsByHash(f)
	for _, seed := range seeds() {
		f.Add(seed.mode, seed.plan, seed.replies)
	}
	f.Fuzz(func(t *testing.T, mode byte, plan, replies []byte) {
		synctest.Test(t, func(t *testing.T) {
			server := &liar{scripts: scripts, resp3: mode&1 != 0, replies: &source{data: replies}}
			rdb := redis.NewClient(&redis.Options{
				Addr: "127.0.0.1:6379", Dialer: server.dial, ContextTimeoutEnabled: mode&2 != 0, MaxRetries: -1,
			})
			opts := append(fencing(mode>>2&3), lock.WithTTL(leaseTTL), lock.WithLogger(slog.New(slog.DiscardHandler)))
			if mode&16 != 0 {
				opts = append(opts, lock.WithMinHold(leaseTTL/2))
			}
			s := &scenario{T: t, server: server, locker: lock.New(rdb, opts...), fenced: mode>>2&3%3 != 0}
			for _, step := range plan[:min(len(plan), steps)] {
				if s.step(step); t.Failed() {
					break
				}
			}
			if s.last != nil {
				s.release()
			}
			wait(t, s.locker)
			require.NoError(t, rdb.Close())
			server.serving.Wait() // it ends with the connections
			require.False(t, server.stormed, "more than %d commands", storm)
		})
	})
}

// step does one thing.
func (s *scenario) step(what byte) {
	s.check()
	switch what % 7 {
	case 0:
		s.acquire(s.locker.TryAcquire)
	case 1:
		s.acquire(func(ctx context.Context, name string) (*lock.Lock, error) {
			ctx, cancel := context.WithTimeout(ctx, patience)
			defer cancel()
			return s.locker.Acquire(ctx, name)
		})
	case 2:
		s.extend()
	case 3:
		s.release()
	case 4:
		time.Sleep(leaseTTL / 4) // renewals
	case 5:
		time.Sleep(2 * leaseTTL) // the end of a lease that is not renewed
	case 6:
		s.line()
	}
	s.check()
}

func (s *scenario) newName() string {
	s.names++
	return fmt.Sprint(s.names)
}

func (s *scenario) acquire(by func(context.Context, string) (*lock.Lock, error)) {
	if s.last != nil {
		s.release()
	}
	name := s.newName()
	lk, err := by(s.Context(), name)
	s.last, s.failed = lk, false
	if err == nil {
		s.checkLock(lk)
	} else {
		s.checkError(name, err)
	}
}

// line lets three want one name, so that a lease may be passed on.
func (s *scenario) line() {
	name, done := s.newName(), make(chan error)
	ctx, cancel := context.WithTimeout(s.Context(), patience)
	defer cancel()
	for range 3 {
		go func() {
			done <- s.locker.Do(ctx, name, func(ctx context.Context) error {
				lk, _ := lock.FromContext(ctx)
				s.checkLock(lk)
				time.Sleep(time.Millisecond)
				s.checkLock(lk)
				return nil
			})
		}()
	}
	for range 3 {
		if err := <-done; err != nil {
			s.checkError(name, err)
		}
	}
}

func (s *scenario) extend() {
	if s.last == nil {
		return
	}
	from := len(s.server.all("lock:" + s.last.Name()))
	err := s.last.Extend(s.Context(), 2*leaseTTL)
	if err != nil {
		s.checkError(s.last.Name(), err)
		return
	}
	s.checkLock(s.last)
	for _, r := range s.server.all("lock:" + s.last.Name())[from:] {
		if _, renewed := r.renews(); renewed && r.ttl() == 2*leaseTTL {
			return
		}
	}
	s.Errorf("extended, but no reply said so: %s", s.story(s.last.Name()))
}

func (s *scenario) release() {
	if s.last == nil {
		return
	}
	name, over := s.last.Name(), !time.Now().Before(s.last.Deadline())
	err := s.last.Release(s.Context())
	over = over || !time.Now().Before(s.last.Deadline())
	require.False(s, s.last.Valid())
	if err != nil {
		s.failed = true
		if !errors.Is(err, lock.ErrLost) {
			return // it says that it does not know, or that nothing was done
		}
		s.checkError(name, err)
		return
	}
	unclear, gone := s.failed, false
	for _, r := range s.server.all("lock:" + name) {
		if r.released() {
			return
		}
		gone = gone || r.ends() && r.gone() && (unclear || over)
		unclear = unclear || r.unclear()
	}
	if !gone {
		s.Errorf("released, but no reply said so: %s", s.story(name))
	}
}

// check looks at the lock that is held.
func (s *scenario) check() {
	if s.last != nil {
		s.checkLock(s.last)
	}
}

// checkLock tells whether replies have granted the lock, its fence, and the time up to its deadline.
func (s *scenario) checkLock(lk *lock.Lock) {
	var granted, fenced bool
	var end time.Time
	for _, r := range s.server.all("lock:" + lk.Name()) {
		last, grants := r.grants()
		if !grants {
			var renews bool
			if last, renews = r.renews(); !renews {
				continue
			}
		}
		granted = granted || grants
		if e := r.at.Add(r.ttl() - r.ttl()/100 - 2*time.Millisecond); e.After(end) {
			end = e
		}
		fenced = fenced || r.reserves(last, lk.Fence())
	}
	switch {
	case !granted:
		s.Errorf("granted, but no reply said so: %s", s.story(lk.Name()))
	case lk.Deadline().After(end):
		s.Errorf("held for %v longer than replies said: %s", lk.Deadline().Sub(end), s.story(lk.Name()))
	case s.fenced && (lk.Fence() <= 0 || !fenced):
		s.Errorf("fence %d, but no reply said so: %s", lk.Fence(), s.story(lk.Name()))
	}
}

// reserves tells whether a reply, to a command that asked for some fences, gave this one, if last is the last.
func (r received) reserves(last int64, fence lock.Fence) bool {
	if len(r.args) < 4 {
		return false // of a plain renewal
	}
	count, err := strconv.ParseInt(r.args[2], 10, 64)
	return err == nil && int64(fence) > last-count && int64(fence) <= last
}

// checkError tells whether an error claims to know what no reply has said.
func (s *scenario) checkError(name string, err error) {
	require.NotEmpty(s, err.Error())
	var held, gone bool
	for _, r := range s.server.all("lock:" + name) {
		_, granted := r.grants() // to another of this process
		held, gone = held || r.held() || granted, gone || r.gone()
	}
	if errors.Is(err, lock.ErrHeld) && !held {
		s.Errorf("%v, but no reply said so: %s", err, s.story(name))
	}
	if errors.Is(err, lock.ErrLost) && !errors.Is(err, lock.ErrUnknown) && !gone {
		s.Errorf("%v, but no reply said so: %s", err, s.story(name))
	}
}

// story tells what was sent for a name and answered.
func (s *scenario) story(name string) string {
	text := ""
	for _, r := range s.server.all("lock:" + name) {
		text += fmt.Sprintf("\n  %s %q -> %q", r.does, r.args, r.reply.text)
	}
	return text
}

// seed is a scenario to begin with.
type seed struct {
	mode          byte
	plan, replies []byte
}

// modes are clients and options of every kind, but not in every combination: fuzzing finds the others.
var modes = []byte{0, 1 | 2, 4 | 2, 8 | 1, 16 | 2, 16 | 4 | 1}

// seeds has one for each kind of reply, as the answer to each kind of command, and some that go well for long.
func seeds() []seed {
	var all []seed
	for _, mode := range modes {
		grant := []byte{ok}
		if mode>>2&3%3 != 0 {
			grant = []byte{fence, 7}
		}
		for kind := range byte(replyKinds) {
			odd := []byte{kind, 1, 1, 1, 1}
			all = append(all,
				seed{mode, []byte{0}, odd},
				seed{mode, []byte{1}, append([]byte{another, 9, 1, 'x'}, odd...)},
				seed{mode, []byte{0, 2}, slices.Concat(grant, odd)},
				seed{mode, []byte{0, 4, 4, 4}, slices.Concat(grant, odd)},
				seed{mode, []byte{0, 3}, slices.Concat(grant, odd)},
				seed{mode, []byte{6}, slices.Concat(grant, []byte{fence, 60}, odd)},
			)
		}
		well := []byte{number, 1, number, 2, ok, number, 0, null, another, 100, 2, 'a', 'b', ok, number, 1, fence, 99, number, 3}
		all = append(all, seed{mode, []byte{0, 2, 3, 0, 3, 1, 4, 5, 3, 6, 6}, slices.Concat(grant, well)})
	}
	return all
}
