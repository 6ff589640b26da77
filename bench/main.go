// Command bench measures the lock against the raw commands that it is made of.
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
	flag.Usage = func() {
		fmt.Fprint(flag.CommandLine.Output(), usage)
		flag.PrintDefaults()
	}
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, c, flag.Args())
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

type config struct {
	pairs, ops, locks int
	ttl, hold         time.Duration
	url               string
}

func run(ctx context.Context, c config, names []string) error {
	scenarios := map[string]func(context.Context, config) error{"uncontended": uncontended, "holding": holding}
	if len(names) == 0 {
		names = []string{"uncontended", "holding"}
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
