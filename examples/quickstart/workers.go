package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/seed-b640e7e9/lock"
)

// transferLock is the name that whoever moves money locks.
const transferLock = "transfers"

// A task is what one worker does.
type task struct {
	Prefix    string
	Seed      uint64
	Worker    int
	Transfers int
	Locked    bool
	Patience  time.Duration // how long to wait for the lock: others take their turns, but a Redis may also be gone
}

// run carries the task out, and writes a byte to done after each transfer.
func (t task) run(ctx context.Context, rdb *redis.Client, done io.Writer) error {
	b := bank{rdb, t.Prefix}
	locker := lock.New(rdb, lock.WithPrefix(t.Prefix), lock.WithMaxWait(t.Patience))
	defer finish(ctx, locker)
	for o := range orders(t.Seed, t.Worker, t.Transfers) {
		transfer := func(ctx context.Context) error { return b.transfer(ctx, o) }

		var err error
		if t.Locked {
			err = locker.Do(ctx, transferLock, transfer)
		} else {
			err = transfer(ctx)
		}
		if err != nil {
			return err
		}
		if _, err := done.Write([]byte{'.'}); err != nil {
			return err
		}
	}
	return nil
}

// finish lets a Locker end what it may still have to clean up, for a process that is about to exit.
func finish(ctx context.Context, locker *lock.Locker) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	_ = locker.Wait(ctx) // what is not cleaned up by then ends with its TTL
}

const maxWorkers = 32

// withoutLock is the first part: it succeeds if the result is wrong.
func (d *demo) withoutLock(ctx context.Context) error {
	d.say("\n1. Without the lock: read a balance, think, write it")
	for workers := d.workers; ; workers = min(2*workers, maxWorkers) {
		balances, err := d.moveMoney(ctx, workers, false)
		if err != nil {
			return err
		}
		right := expected(d.seed, workers, d.transfers)
		d.say("   It should be %s and %s.", right[0], right[1])
		wrong := balances[0] + balances[1] - 2*opening
		switch {
		case wrong < 0:
			d.say("   %s is missing.", -wrong)
			return nil
		case wrong > 0:
			d.say("   %s has come from nowhere.", wrong)
			return nil
		case workers == maxWorkers:
			return errors.New("no money was lost or made without the lock, so this run proves nothing about the lock")
		}
		d.say("   By luck no money was lost or made. Once more, with more workers.")
	}
}

// withLock is the second part: it succeeds if both accounts have what they must have.
func (d *demo) withLock(ctx context.Context) error {
	d.say("\n2. With the lock: the same inside Do")
	balances, err := d.moveMoney(ctx, d.workers, true)
	if err != nil {
		return err
	}
	if right := expected(d.seed, d.workers, d.transfers); balances != right {
		return fmt.Errorf("with the lock Alice and Bob should have %s and %s", right[0], right[1])
	}
	d.say("   Not a cent is missing, in neither account.")
	return nil
}

// moveMoney lets workers work at the same time, and returns the balances when all have finished.
func (d *demo) moveMoney(ctx context.Context, workers int, locked bool) ([2]cents, error) {
	b := bank{d.rdb, d.prefix}
	if err := b.open(ctx); err != nil {
		return [2]cents{}, err
	}
	d.say("   Alice and Bob have %s each, %s in all. %d workers make %d transfers each ...", opening, 2*opening, workers, d.transfers)
	begin := time.Now()
	done := new(counter)
	stop := d.reportProgress(done, workers*d.transfers)
	err := d.employ(ctx, workers, func(ctx context.Context, w int) error {
		t := task{Prefix: d.prefix, Seed: d.seed, Worker: w, Transfers: d.transfers, Locked: locked,
			Patience: 5*time.Second + time.Duration(workers*d.transfers)*50*time.Millisecond}
		if d.server.embedded != nil {
			rdb := d.server.client()
			defer rdb.Close()
			return t.run(ctx, rdb, done)
		}
		return startProcess(ctx, t, d.server.url, done)
	})
	stop()
	if err != nil {
		return [2]cents{}, err
	}
	balances, err := b.balances(ctx)
	if err != nil {
		return balances, err
	}
	d.say("   %d transfers in %.2f s. Now Alice has %s and Bob %s, %s in all.", done.n.Load(), time.Since(begin).Seconds(),
		balances[0], balances[1], balances[0]+balances[1])
	return balances, nil
}

// employ runs all workers at once, and returns when all have ended. If one fails the others are stopped.
func (d *demo) employ(ctx context.Context, workers int, work func(ctx context.Context, w int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			if err := work(ctx, w); err != nil {
				cancel(fmt.Errorf("worker %d: %w", w+1, err)) // the first cause stays
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

// counter counts the bytes that workers write, each for a transfer.
type counter struct{ n atomic.Int64 }

func (c *counter) Write(p []byte) (int, error) {
	c.n.Add(int64(len(p)))
	return len(p), nil
}

// reportProgress prints now and then how far the workers are, until stop is called.
func (d *demo) reportProgress(done *counter, all int) (stop func()) {
	end := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(500 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				d.say("   ... %d of %d", done.n.Load(), all)
			case <-end:
				return
			}
		}
	})
	return func() { close(end); wg.Wait() }
}

// taskVariable holds the task, as JSON, in the environment of a worker process.
const taskVariable = "QUICKSTART_TASK"

// startProcess runs this program again as a worker, and waits for its end.
func startProcess(ctx context.Context, t task, url string, done io.Writer) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	text, err := json.Marshal(t)
	if err != nil {
		return err
	}
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = append(os.Environ(), taskVariable+"="+string(text), "REDIS_URL="+url)
	cmd.Stdout, cmd.Stderr = done, &stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // so that it can release its lock
	cmd.WaitDelay = 3 * time.Second
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(stderr.String()))
	}
	return nil
}

// workerProcess is main in a worker process. It returns the exit status.
func workerProcess(text string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	err := func() error {
		var t task
		if err := json.Unmarshal([]byte(text), &t); err != nil {
			return err
		}
		options, err := parseURL(os.Getenv("REDIS_URL"))
		if err != nil {
			return err
		}
		rdb := redis.NewClient(options)
		defer rdb.Close()
		return t.run(ctx, rdb, os.Stdout)
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
