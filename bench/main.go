// Command bench measures the lock against the raw commands that it is made of, and against other libraries.
//
// What makes it honest: whatever is compared runs in the same process, on the same server and with the same settings,
// in small rounds that take turns in random order (a fixed order favours one side by up to 20 % on a small machine);
// the figure is the median of the ratios of neighbouring rounds, with its 95 % interval; and the raw commands are
// compared with themselves as well, which shows what the machine's noise alone looks like.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"time"
)

const usage = `Usage: go run . [flags] [scenario ...]

Scenarios, all by default:
  uncontended  acquire and release of one lock beside raw SetNX and a compare-and-delete script
  holding      many locks held by one Locker
  contended    goroutines of one process that want one lock, beside other libraries
  slow         the same with a millisecond added to each round trip
  processes    the same in several processes of eight goroutines
  poller       a client that only asks now and then, against a busy process
  redlock      a quorum of 3 and 5 nodes, beside redsync
  handoff      from the call of release to the next holder, within a process and between two

It starts a redis-server of its own, unless REDIS_URL names one.

Flags:
`

func main() {
	var c config
	flag.IntVar(&c.pairs, "pairs", 1000, "pairs of rounds a comparison")
	flag.IntVar(&c.ops, "ops", 100, "operations in a round")
	flag.IntVar(&c.locks, "locks", 10_000, "locks held")
	flag.DurationVar(&c.ttl, "ttl", 10*time.Second, "TTL of held locks")
	flag.DurationVar(&c.hold, "hold", time.Minute, "how long they are held")
	flag.DurationVar(&c.each, "each", 2*time.Second, "time of each measurement under contention")
	flag.IntVar(&c.rounds, "rounds", 200, "rounds of handoffs")
	flag.Usage = func() {
		fmt.Fprint(flag.CommandLine.Output(), usage)
		flag.PrintDefaults()
	}
	flag.Parse()
	if job := os.Getenv(childJob); job != "" {
		if err := child(job); err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, c, flag.Args())
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

type config struct {
	pairs, ops, locks, rounds int
	ttl, hold, each           time.Duration
	url                       string
}

func run(ctx context.Context, c config, names []string) error {
	scenarios := map[string]func(context.Context, config) error{
		"uncontended": uncontended, "holding": holding, "contended": contended, "slow": slowLink, "processes": processes,
		"handoff": handoff, "poller": poller, "redlock": quorum,
	}
	if len(names) == 0 {
		names = []string{"uncontended", "holding", "contended", "slow", "processes", "handoff", "poller", "redlock"}
	}
	for _, name := range names {
		if scenarios[name] == nil {
			return fmt.Errorf("no scenario %q; see -h", name)
		}
	}
	url, stop, err := server(ctx)
	if err != nil {
		return err
	}
	defer stop()
	c.url = url
	for _, name := range names {
		if err := scenarios[name](ctx, c); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}
