package main

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"
)

const sample = 20_000 // of waits that are kept

// tally is what goroutines did that wanted one lock for a while.
type tally struct {
	Sections []int           // of each goroutine
	Waits    []time.Duration // a sample of them
	Longest  time.Duration   // wait, also one that was in vain
	Commands int64
	Took     time.Duration
	Stalled  bool // goroutines did not come back when the time was over
}

func (t *tally) add(o tally) {
	t.Sections = append(t.Sections, o.Sections...)
	t.Waits = append(t.Waits, o.Waits...)
	t.Longest = max(t.Longest, o.Longest)
	t.Commands += o.Commands
	t.Took = max(t.Took, o.Took)
	t.Stalled = t.Stalled || o.Stalled
}

// thin keeps some of the waits, at random.
func (t *tally) thin(n int) {
	rand.Shuffle(len(t.Waits), func(i, j int) { t.Waits[i], t.Waits[j] = t.Waits[j], t.Waits[i] })
	t.Waits = t.Waits[:min(len(t.Waits), n)]
}

func (t *tally) sum() float64 {
	sum := 0
	for _, n := range t.Sections {
		sum += n
	}
	return float64(sum)
}

// rate is sections a second.
func (t *tally) rate() float64 { return t.sum() / t.Took.Seconds() }

// commands is what a section costs the server.
func (t *tally) commands() float64 { return float64(t.Commands) / max(t.sum(), 1) }

// jain is Jain's index of fairness: 1 if all had the same, 1/n if one of n had all.
func (t *tally) jain() float64 {
	squares := 0.0
	for _, n := range t.Sections {
		squares += float64(n) * float64(n)
	}
	return t.sum() * t.sum() / (float64(len(t.Sections)) * max(squares, 1))
}

func tallyHead(what string) []string {
	return []string{what, "", "sections a second", "commands a section", "wait p50, p99, max", "least, most of a goroutine", "Jain's index"}
}

func (t *tally) row(n int, name string) []string {
	if t.Stalled {
		name += " (stalled)"
	}
	slices.Sort(t.Waits)
	return []string{
		strconv.Itoa(n), name, fmt.Sprintf("%.0f", t.rate()), fmt.Sprintf("%.3f", t.commands()),
		fmt.Sprintf("%s, %s, %s", brief(at(t.Waits, 0.5)), brief(at(t.Waits, 0.99)), brief(t.Longest)),
		fmt.Sprintf("%d, %d", slices.Min(t.Sections), slices.Max(t.Sections)), fmt.Sprintf("%.2f", t.jain()),
	}
}
