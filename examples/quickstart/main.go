// Command quickstart shows what the lock does, with figures that it counts while it runs:
//
//	go run ./examples/quickstart
//	REDIS_URL=redis://localhost:6379 go run ./examples/quickstart
//
// Several workers move money between two accounts that are kept in Redis: first without the lock, then with it. Then a
// holder is cut off from Redis, is told of it before the next holder gets in, and writes nevertheless, which its fence
// prevents. It takes some seconds.
//
// Without REDIS_URL it starts a server inside the process and the workers are goroutines. With REDIS_URL the workers
// are processes. All keys of a run have a prefix of its own, and are deleted at the end.
//
// To learn the library, read workers.go for the lock itself, then cutoff.go for what happens when things go wrong.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
)

func main() {
	if task := os.Getenv(taskVariable); task != "" {
		os.Exit(workerProcess(task)) // one of the processes that run in run starts
	}
	signal.Ignore(syscall.SIGPIPE) // "| head" must not keep it from cleaning up
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the process at once
	os.Exit(run(ctx, os.Args[1:], os.Getenv("REDIS_URL"), os.Stdout, os.Stderr))
}

// run is main without the process around it. It returns the exit status: 0 if all held that is shown, 1 if something
// did not or Redis could not be reached, 2 if the arguments make no sense.
func run(ctx context.Context, args []string, url string, stdout, stderr io.Writer) int {
	conf, err := parse(args, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err != nil {
		return 2
	}
	begin := time.Now()
	if err := show(ctx, conf, url, stdout); err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("stopped: %w", err)
		}
		fmt.Fprintln(stderr, "quickstart:", err)
		return 1
	}
	fmt.Fprintf(stdout, "\nAll of this held, in %.1f s. Nothing is left in Redis.\n", time.Since(begin).Seconds())
	return 0
}

type config struct {
	workers   int
	transfers int // of each worker
	seed      uint64
}

func parse(args []string, stderr io.Writer) (config, error) {
	var c config
	fs := flag.NewFlagSet("quickstart", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.IntVar(&c.workers, "workers", 4, "how many move money at the same time, 2 to 32")
	fs.IntVar(&c.transfers, "transfers", 50, "how many transfers each of them makes, 1 to 1000")
	fs.Uint64Var(&c.seed, "seed", 0, "what the amounts are drawn from; 0 is another one each time")
	fs.Usage = func() {
		fmt.Fprintln(stderr, `quickstart shows what a distributed lock is for: money that is moved without it is lost or made, with it every
cent is there; a holder that is cut off from Redis hears of it before the next gets in, and can't do harm later.

With REDIS_URL (redis://[user:password@]host:port[/db]) it uses that Redis, and the workers are processes; without, a
server inside this process, and the workers are goroutines. What it writes to Redis it deletes at the end.
The exit status is 0 if all of it held, 1 if not or if Redis can't be reached.

Usage: quickstart [flags]`)
		fs.PrintDefaults()
	}
	if err := fs.Parse(args); err != nil {
		return c, err
	}
	if fs.NArg() > 0 || c.workers < 2 || c.workers > maxWorkers || c.transfers < 1 || c.transfers > 1000 {
		fmt.Fprintf(stderr, "quickstart: %q does not make sense; -h explains the flags\n", args)
		return c, errors.New("bad arguments")
	}
	if c.seed == 0 {
		c.seed = rand.Uint64()
	}
	return c, nil
}

// demo is one run.
type demo struct {
	config
	server *server
	rdb    *redis.Client // for what is done in this process
	prefix string        // of all keys; its hash tag keeps them in one slot of a cluster

	mu  sync.Mutex // guards out
	out io.Writer
}

// show connects, shows all, and cleans up.
func show(ctx context.Context, c config, url string, out io.Writer) (err error) {
	srv, err := connect(ctx, url)
	if err != nil {
		return err
	}
	defer srv.close()
	d := &demo{config: c, out: out, server: srv, rdb: srv.client(), prefix: "{quickstart-" + uuid.NewString() + "}:"}
	defer d.rdb.Close()
	defer func() { err = errors.Join(err, d.cleanUp(ctx)) }()

	d.say("Redis: %s. Workers: %d %s. Seed: %d.", srv.name, c.workers, srv.workerKind(), c.seed)
	for _, part := range []func(context.Context) error{d.withoutLock, d.withLock, d.cutOff} {
		if err := part(ctx); err != nil {
			return err
		}
	}
	return nil
}

// say prints a line at once, so that what is shown can be watched.
func (d *demo) say(format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	fmt.Fprintf(d.out, format+"\n", args...)
}

// cleanUp deletes what the run has left in Redis, also after a failed or interrupted run. The locks themselves are
// released; what stays by design is the memory of fencing. It lives at keys that the library documents.
func (d *demo) cleanUp(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	var keys []string
	for _, account := range accounts {
		keys = append(keys, d.prefix+account)
	}
	ledger := d.prefix + ledgerKey
	keys = append(keys, ledger, ledger+":fenced")
	for _, name := range []string{transferLock, ledgerLock} {
		keys = append(keys, d.prefix+"lock:"+name, d.prefix+"fence:"+name)
	}
	if err := d.rdb.Del(ctx, keys...).Err(); err != nil {
		return fmt.Errorf("keys that begin with %q may be left in Redis: %w", d.prefix, err)
	}
	return nil
}
