package main

import (
	"context"
	crand "crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// tally is what goroutines did that wanted one lock for a while.
type tally struct {
	Sections []int           // of each goroutine
	Waits    []time.Duration // a sample of them
	Commands int64
	Took     time.Duration
	Stalled  bool // goroutines did not come back when the time was over
}

func (t *tally) add(o tally) {
	t.Sections = append(t.Sections, o.Sections...)
	t.Waits = append(t.Waits, o.Waits...)
	t.Commands += o.Commands
	t.Took = max(t.Took, o.Took)
	t.Stalled = t.Stalled || o.Stalled
}

const patience = 10 * time.Second // beyond the time that was set

// contend lets goroutines take the lock again and again, with nothing to do under it.
func contend(p peer, w *wire, addr, key string, goroutines int, each time.Duration) (tally, error) {
	s, err := p.open(addr, key, w)
	if err != nil {
		return tally{}, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), each)
	defer cancel()
	var inside atomic.Int32
	var two atomic.Bool
	var wg sync.WaitGroup
	counts, waits := make([]atomic.Int64, goroutines), make([][]time.Duration, goroutines)
	begin := time.Now()
	for i := range goroutines {
		wg.Go(func() {
			for ctx.Err() == nil {
				asked := time.Now()
				unlock, err := s.lock(ctx)
				if err != nil {
					continue
				}
				waits[i] = append(waits[i], time.Since(asked))
				if inside.Add(1) != 1 {
					two.Store(true)
				}
				counts[i].Add(1)
				inside.Add(-1)
				_ = unlock()
			}
		})
	}
	back := make(chan struct{})
	go func() {
		wg.Wait()
		close(back)
	}()
	t := tally{}
	select {
	case <-back:
		for _, w := range waits {
			t.Waits = append(t.Waits, w...)
		}
		rand.Shuffle(len(t.Waits), func(i, j int) { t.Waits[i], t.Waits[j] = t.Waits[j], t.Waits[i] })
		t.Waits = t.Waits[:min(len(t.Waits), 20_000)]
		s.close()
	case <-time.After(each + patience):
		t.Stalled = true
	}
	t.Took, t.Commands = min(time.Since(begin), each+time.Second), w.commands.Load()
	for i := range counts {
		t.Sections = append(t.Sections, int(counts[i].Load()))
	}
	if two.Load() {
		return t, errors.New(p.name + ": two goroutines were inside")
	}
	return t, nil
}

const tallyHead = "| %s | | sections a second | commands a section | wait p50, p99, max | least, most of a goroutine | Jain's index |\n|---|---|---|---|---|---|---|\n"

func (t tally) row(what, name string) {
	sum, squares := 0, 0.0
	for _, n := range t.Sections {
		sum += n
		squares += float64(n) * float64(n)
	}
	if t.Stalled {
		name += " (stalled)"
	}
	slices.Sort(t.Waits)
	at := func(q float64) time.Duration {
		if len(t.Waits) == 0 {
			return 0
		}
		return t.Waits[int(q*float64(len(t.Waits)-1))].Round(time.Microsecond)
	}
	jain := float64(sum) * float64(sum) / (float64(len(t.Sections)) * max(squares, 1))
	fmt.Printf("| %s | %s | %.0f | %.3f | %v, %v, %v | %d, %d | %.2f |\n", what, name, float64(sum)/t.Took.Seconds(),
		float64(t.Commands)/max(float64(sum), 1), at(0.5), at(0.99), at(1), slices.Min(t.Sections), slices.Max(t.Sections), jain)
}

func contended(ctx context.Context, c config) error {
	fmt.Printf("## contended: one process, %v each\n\n"+tallyHead, c.each, "goroutines")
	return crowds(ctx, c, []int{2, 8, 16, 64, 1024}, 0)
}

func slowLink(ctx context.Context, c config) error {
	fmt.Printf("## slow: one process, a millisecond added to each round trip, %v each\n\n"+tallyHead, c.each, "goroutines")
	return crowds(ctx, c, []int{8, 64}, time.Millisecond)
}

func crowds(ctx context.Context, c config, sizes []int, delay time.Duration) error {
	addr, err := address(c.url)
	if err != nil {
		return err
	}
	for _, n := range sizes {
		rows := make([]tally, len(peers))
		for _, i := range rand.Perm(len(peers)) {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			fmt.Fprintf(os.Stderr, "\r\033[K%d goroutines: %s ", n, peers[i].name)
			w := &wire{delay: delay}
			if rows[i], err = contend(peers[i], w, addr, newKey(), n, c.each); err != nil {
				return err
			}
		}
		fmt.Fprint(os.Stderr, "\r\033[K")
		for i, t := range rows {
			t.row(fmt.Sprint(n), peers[i].name)
		}
	}
	fmt.Println()
	return nil
}

func newKey() string { return "bench:" + crand.Text() }

func address(raw string) (string, error) {
	u, err := url.Parse(raw)
	if err != nil {
		return "", err
	}
	return u.Host, nil
}

// childJob is the variable that makes a process one of several: it holds a job.
const childJob = "LOCK_BENCH_JOB"

type job struct {
	Peer, Addr, Key string
	Goroutines      int
	Each            time.Duration
}

func child(text string) error {
	var j job
	if err := json.Unmarshal([]byte(text), &j); err != nil {
		return err
	}
	t, err := contend(find(j.Peer), &wire{}, j.Addr, j.Key, j.Goroutines, j.Each)
	if err != nil {
		return err
	}
	t.Waits = t.Waits[:min(len(t.Waits), 2000)]
	return json.NewEncoder(os.Stdout).Encode(t)
}

func processes(ctx context.Context, c config) error {
	const goroutines = 8
	fmt.Printf("## processes: of %d goroutines each, %v each\n\n"+tallyHead, goroutines, c.each, "processes")
	addr, err := address(c.url)
	if err != nil {
		return err
	}
	for _, n := range []int{2, 4, 8} {
		for _, p := range peers {
			fmt.Fprintf(os.Stderr, "\r\033[K%d processes: %s ", n, p.name)
			text, err := json.Marshal(job{p.name, addr, newKey(), goroutines, c.each})
			if err != nil {
				return err
			}
			t, err := children(ctx, n, string(text))
			if err != nil {
				return fmt.Errorf("%s: %w", p.name, err)
			}
			fmt.Fprint(os.Stderr, "\r\033[K")
			t.row(fmt.Sprint(n), p.name)
		}
	}
	fmt.Println()
	return nil
}

func children(ctx context.Context, n int, text string) (tally, error) {
	exe, err := os.Executable()
	if err != nil {
		return tally{}, err
	}
	var all tally
	var mu sync.Mutex
	var wg sync.WaitGroup
	var failed error
	for range n {
		wg.Go(func() {
			cmd := exec.CommandContext(ctx, exe)
			cmd.Env = append(os.Environ(), childJob+"="+text)
			var errs strings.Builder
			cmd.Stderr = &errs
			out, err := cmd.Output()
			var t tally
			if err == nil {
				err = json.Unmarshal(out, &t)
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failed = fmt.Errorf("%w: %s", err, errs.String())
			}
			all.add(t)
		})
	}
	wg.Wait()
	return all, failed
}
