package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"time"

	"golang.org/x/perf/benchmath"
)

// contestant is one side of a comparison: op does the work once.
type contestant struct {
	name string
	op   func() error
}

// result is what a comparison of A with B found.
type result struct {
	ratio    benchmath.Summary // of A's time to B's, pair by pair
	time     time.Duration     // of A, median of the rounds, for one operation
	allocs   float64           // of A, for one operation
	allocsOf float64           // of B
}

// compare runs pairs of rounds in random order and returns the ratios.
func compare(ctx context.Context, c config, a, b contestant) (result, error) {
	var r result
	var err error
	if r.allocs, err = allocs(a.op); err != nil {
		return r, err
	}
	if r.allocsOf, err = allocs(b.op); err != nil {
		return r, err
	}
	ratios := make([]float64, 0, c.pairs)
	times := make([]float64, 0, c.pairs)
	for i := range c.pairs {
		if i%100 == 0 {
			fmt.Fprintf(os.Stderr, "\r%s / %s: %d of %d pairs ", a.name, b.name, i, c.pairs)
		}
		first, second := a, b
		swapped := rand.N(2) == 1
		if swapped {
			first, second = b, a
		}
		t1, err := round(ctx, c.ops, first.op)
		if err != nil {
			return r, err
		}
		t2, err := round(ctx, c.ops, second.op)
		if err != nil {
			return r, err
		}
		if swapped {
			t1, t2 = t2, t1
		}
		ratios = append(ratios, float64(t1)/float64(t2))
		times = append(times, float64(t1)/float64(c.ops))
	}
	fmt.Fprint(os.Stderr, "\r\033[K")
	r.ratio = median(ratios)
	r.time = time.Duration(median(times).Center)
	return r, nil
}

func median(values []float64) benchmath.Summary {
	return benchmath.AssumeNothing.Summary(benchmath.NewSample(values, &benchmath.DefaultThresholds), 0.95)
}

func round(ctx context.Context, ops int, op func() error) (time.Duration, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	start := time.Now()
	for range ops {
		if err := op(); err != nil {
			return 0, err
		}
	}
	return time.Since(start), nil
}

// allocs returns the allocations of one operation, after a warm-up.
func allocs(op func() error) (float64, error) {
	const n = 2000
	var before, after runtime.MemStats
	for range n {
		if err := op(); err != nil {
			return 0, err
		}
	}
	runtime.ReadMemStats(&before)
	for range n {
		if err := op(); err != nil {
			return 0, err
		}
	}
	runtime.ReadMemStats(&after)
	return float64(after.Mallocs-before.Mallocs) / n, nil
}
