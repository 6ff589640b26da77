package main

import (
	"context"
	"fmt"

	"github.com/seed-b640e7e9/lock/bench/internal/report"
)

// holding measures what held locks cost, each number of them in a child that does nothing else.
func holding(ctx context.Context, c config) (report.Section, error) {
	s := report.Section{
		Title: "Holding: many locks, one Locker",
		Text: fmt.Sprintf("TTL %v, held for %v in a process of their own. Bytes are the heap without the names and the slice of handles, which are the benchmark's; "+
			"with less than 100 locks they would tell of the client's buffers only. The last column leaves out the bare key and token too. "+
			"CPU is of one core, the server's by its own account. Lateness is measured in a second run of half the time, by a Store in between: "+
			"when a renewal is sent, against a third of the TTL after the last confirmed send; most are sent early.", c.holdTTL, c.hold),
	}
	t := report.Table{Head: []string{"locks", "lost", "goroutines before, median, most", "client CPU", "server CPU", "renewals a second",
		"late p50, p99, max", "bytes a lock", "over key and token"}}
	mine, servers := report.Series{Name: "client"}, report.Series{Name: "server"}
	bytes := report.Series{Name: "bytes over key and token"}
	for _, n := range c.locks {
		h, err := holdTwice(ctx, c, n)
		if err != nil {
			return s, err
		}
		t.Add(fmt.Sprint(n), fmt.Sprint(h.Lost), fmt.Sprintf("%d, %d, %d", h.Before, h.Usual, h.Most), percent(h.CPU), percent(h.ServerCPU),
			fmt.Sprintf("%.1f", h.Renewals), fmt.Sprintf("%s, %s, %s", brief(at(h.Late, 0.5)), brief(at(h.Late, 0.99)), brief(at(h.Late, 1))),
			bytesOf(n, h.Bytes), bytesOf(n, h.Bytes-h.Bare))
		mine.Add(float64(n), 100*h.CPU)
		servers.Add(float64(n), 100*h.ServerCPU)
		if n >= 100 {
			bytes.Add(float64(n), h.Bytes-h.Bare)
		}
		s.Targets = holdTargets(n, h)
	}
	s.Tables = []report.Table{t}
	s.Charts = []report.Chart{
		{Name: "holding-cpu", Title: fmt.Sprintf("CPU while locks are held, TTL %v", c.holdTTL), X: "locks", Y: "% of a core", LogX: true, Series: []report.Series{mine, servers}},
	}
	if len(bytes.X) > 0 {
		s.Charts = append(s.Charts, report.Chart{Name: "holding-bytes", Title: "Heap for each lock held", X: "locks", Y: "bytes over key and token", LogX: true, Series: []report.Series{bytes}})
	}
	return s, nil
}

// bytesOf shows bytes a lock, unless there are so few locks that what a Locker needs anyway is more.
func bytesOf(n int, bytes float64) string {
	if n < 100 {
		return ""
	}
	return fmt.Sprintf("%.0f", bytes)
}

func percent(share float64) string { return fmt.Sprintf("%.2f %%", 100*share) }

// holdTargets are those of the largest number: what is measured last.
func holdTargets(n int, h held) []report.Target {
	what := fmt.Sprintf("%d locks held: ", n)
	return []report.Target{
		report.AtMost(what+"bytes a lock over key and token", 1024, h.Bytes-h.Bare, fmt.Sprintf("%.0f", h.Bytes-h.Bare)),
		report.AtMost(what+"goroutines more than before, median", 0, float64(h.Usual-h.Before), fmt.Sprintf("%d (at most %d)", h.Usual-h.Before, h.Most-h.Before)),
		report.AtMost(what+"client CPU, % of a core", 10, 100*h.CPU, fmt.Sprintf("%.1f", 100*h.CPU)),
	}
}

// holdTwice measures the cost of n locks, and then how late renewals are, so that the one does not burden the other.
func holdTwice(ctx context.Context, c config, n int) (held, error) {
	var h, late held
	progress("%d locks, for %v", n, c.hold)
	if err := inChild(ctx, job{Hold: &holdJob{URL: c.url, Locks: n, TTL: c.holdTTL, Hold: c.hold}}, &h); err != nil {
		return h, err
	}
	lateHold := max(c.hold/2, c.holdTTL)
	progress("%d locks, lateness, for %v", n, lateHold)
	if err := inChild(ctx, job{Hold: &holdJob{URL: c.url, Locks: n, TTL: c.holdTTL, Hold: lateHold, Timed: true}}, &late); err != nil {
		return h, err
	}
	h.Late, h.Lost = late.Late, h.Lost+late.Lost
	return h, nil
}
