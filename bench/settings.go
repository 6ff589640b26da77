package main

import (
	"flag"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// config is what all scenarios are told.
type config struct {
	url                 string
	doc                 string
	quick, instructions bool
	pairs, ops, rounds  int
	each, hold, holdTTL time.Duration
	goroutines, procs   sizes // that want one lock
	locks               sizes // of holding
	waiters, names      sizes // of growth
	held                sizes
}

// allocOps is how many operations are done to count what one allocates.
func (c config) allocOps() int { return min(2000, c.pairs*c.ops) }

// tries is how often something is measured that takes long.
func (c config) tries() int { return min(max(c.rounds/5, 1), 20) }

// sizes is a list of numbers that a flag can set.
type sizes []int

func (s *sizes) String() string {
	var texts []string
	for _, n := range *s {
		texts = append(texts, strconv.Itoa(n))
	}
	return strings.Join(texts, ",")
}

// Set makes sizes a flag.Value.
func (s *sizes) Set(text string) error {
	*s = nil
	for part := range strings.SplitSeq(text, ",") {
		n, err := strconv.Atoi(strings.ReplaceAll(strings.TrimSpace(part), "_", ""))
		if err != nil || n < 1 {
			return fmt.Errorf("%q is no number of things", part)
		}
		*s = append(*s, n)
	}
	return nil
}

const usage = `Usage: go run . [flags] [scenario ...]

It starts redis-servers of its own, unless REDIS_URL names one to measure with (Redlock and Cluster start theirs always).
The tables go to stdout as Markdown; with pictures they are in a file that is named in the end, or that -doc names.

Scenarios, all by default:
`

// quickly is what -quick makes of flags that are not set.
var quickly = map[string]string{
	"instructions": "false", "pairs": "40", "ops": "50", "rounds": "10", "each": "150ms", "hold": "3s", "hold-ttl": "3s",
	"locks": "1,10_000", "waiters": "1,10,100,1_000", "names": "1,100,10_000", "held": "1,100,1_000",
}

// settings reads the command line: flags, and names of scenarios.
func settings(args []string) (config, []string, error) {
	c := config{
		goroutines: sizes{2, 8, 16, 64, 1024},
		procs:      sizes{2, 4, 8},
		locks:      sizes{1, 1000, 10_000, 100_000},
		waiters:    sizes{1, 10, 100, 1000, 10_000},
		names:      sizes{1, 10, 100, 1000, 10_000, 100_000, 1_000_000},
		held:       sizes{1, 10, 100, 1000, 10_000, 100_000},
	}
	f := flag.NewFlagSet("bench", flag.ContinueOnError)
	f.StringVar(&c.doc, "doc", "", "Markdown `file` whose generated part is replaced, with pictures in a folder beside it")
	f.BoolVar(&c.quick, "quick", false, "a look at everything within two minutes; the figures are too rough to be quoted")
	f.BoolVar(&c.instructions, "instructions", true, "count instructions, where there is valgrind; it takes a minute")
	f.IntVar(&c.pairs, "pairs", 1000, "pairs of rounds a comparison")
	f.IntVar(&c.ops, "ops", 100, "operations in a round")
	f.IntVar(&c.rounds, "rounds", 100, "rounds of longer comparisons: handoffs, throughput")
	f.DurationVar(&c.each, "each", 1500*time.Millisecond, "time of each measurement under contention")
	f.DurationVar(&c.hold, "hold", time.Minute, "how long locks are held")
	f.DurationVar(&c.holdTTL, "hold-ttl", 30*time.Second, "TTL of locks that are held")
	f.Var(&c.goroutines, "goroutines", "goroutines that want one lock")
	f.Var(&c.procs, "processes", "processes that want one lock")
	f.Var(&c.locks, "locks", "how many locks are held")
	f.Var(&c.waiters, "waiters", "growth: waiters")
	f.Var(&c.names, "names", "growth: names used so far")
	f.Var(&c.held, "held", "growth: locks held by the same Locker")
	f.Usage = func() {
		fmt.Fprint(f.Output(), usage)
		for _, s := range scenarios {
			fmt.Fprintf(f.Output(), "  %-12s %s\n", s.name, s.about)
		}
		fmt.Fprint(f.Output(), "\nFlags:\n")
		f.PrintDefaults()
	}
	if err := f.Parse(args); err != nil {
		return c, nil, err
	}
	if c.quick {
		if err := quicken(f); err != nil {
			return c, nil, err
		}
	}
	names, err := chosen(f.Args())
	return c, names, err
}

func quicken(f *flag.FlagSet) error {
	set := map[string]bool{}
	f.Visit(func(given *flag.Flag) { set[given.Name] = true })
	for name, value := range quickly {
		if set[name] {
			continue
		}
		if err := f.Set(name, value); err != nil {
			return err
		}
	}
	return nil
}

// chosen returns the scenarios to run.
func chosen(args []string) ([]string, error) {
	for _, name := range args {
		if find(name) == nil {
			return nil, fmt.Errorf("no scenario %q; see -h", name)
		}
	}
	if len(args) > 0 {
		return args, nil
	}
	var all []string
	for _, s := range scenarios {
		all = append(all, s.name)
	}
	return all, nil
}
