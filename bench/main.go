// Command bench measures the lock against the raw commands that it is made of, and against other libraries.
//
// What makes it honest: whatever is compared runs in one process, on one server and with the same settings, in small
// rounds that take turns in random order (a fixed order favours one side by up to 20 % on a small machine); the figure is
// the median of the ratios of neighbouring rounds, with its 95 % interval; the raw commands are compared with themselves
// as well, which shows what the machine's noise alone looks like; and whoever stalls does so within a time limit.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/seed-b640e7e9/lock/bench/internal/report"
)

// scenarios are run in this order.
var scenarios = []struct {
	name, about string
	run         func(context.Context, config) (report.Section, error)
}{
	{"uncontended", "acquire and release of one lock, beside raw commands and other libraries", uncontended},
	{"distinct", "the same by 64 goroutines on names of their own: throughput", distinct},
	{"contended", "goroutines of one process that want one lock", contended},
	{"processes", "the same in several processes of eight goroutines", processes},
	{"handoff", "from the call of release to the next holder, within a process and between two", handoff},
	{"holding", "many locks held by one Locker", holding},
	{"slow", "a slow network: round trips of each operation, and contention", slowLink},
	{"growth", "more waiters, more names, more locks held", growth},
	{"cluster", "three primaries beside one server", onCluster},
	{"redlock", "a quorum of 3 and 5 nodes, beside redsync", quorum},
	{"poller", "a client that only asks now and then, against a busy process", poller},
}

func main() {
	if text := os.Getenv(childJob); text != "" {
		exit(child(text))
	}
	c, names, err := settings(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		exit(err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM) // else servers would stay
	err = run(ctx, c, names)
	stop()
	exit(err)
}

func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// run runs the scenarios. One that fails does not keep the others from running.
func run(ctx context.Context, c config, names []string) error {
	doc, path, err := document(c)
	if err != nil {
		return err
	}
	url, stop, err := server(ctx)
	if err != nil {
		return err
	}
	defer stop()
	c.url = url
	intro, err := introduction(ctx, c)
	if err != nil {
		return err
	}
	fmt.Print(intro)
	var sections []report.Section
	var failed error
	for i, name := range names {
		stage(i+1, len(names), name)
		s, err := find(name)(ctx, c)
		endProgress()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: %w", name, err))
			s = report.Section{Title: name, Text: "This scenario failed: " + err.Error()}
		}
		sections = append(sections, s)
		fmt.Print(s.Markdown(""))
	}
	fmt.Print(targetText(sections))
	if err := doc.Write(intro, sections); err != nil {
		return err
	}
	fmt.Fprintln(os.Stderr, "bench: all of this, with pictures, is in", path)
	return failed
}

// find returns a scenario, or nil.
func find(name string) func(context.Context, config) (report.Section, error) {
	for _, s := range scenarios {
		if s.name == name {
			return s.run
		}
	}
	return nil
}

// document is where the report goes: a new folder, unless the user has said where.
func document(c config) (*report.Document, string, error) {
	path := c.doc
	if path == "" {
		folder, err := os.MkdirTemp("", "lock-bench-")
		if err != nil {
			return nil, "", err
		}
		path = filepath.Join(folder, "performance.md")
	}
	d, err := report.NewDocument(path)
	return d, path, err
}

func targetText(sections []report.Section) string {
	s := report.Targets(sections)
	if len(s.Tables) == 0 {
		return ""
	}
	return s.Markdown("")
}
