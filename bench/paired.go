package main

import (
	"context"
	"math/rand/v2"
	"time"

	"golang.org/x/perf/benchmath"
)

// contestant is one side of a comparison: op does the work once.
type contestant struct {
	name string
	op   func() error
}

// cost is what a round took.
type cost struct{ time, cpu float64 }

// result is what a comparison of A with B found.
type result struct {
	time, cpu benchmath.Summary // A's to B's, pair by pair
	each      time.Duration     // time of A, median of the rounds, for one operation
	with      time.Duration     // time of B, the same
	eachCPU   time.Duration     // CPU time of A, the same
}

// compare runs pairs of rounds in random order and returns the ratios.
func compare(ctx context.Context, pairs, ops int, a, b contestant) (result, error) {
	for _, op := range []func() error{a.op, b.op} {
		if _, err := round(ctx, ops, op); err != nil { // warm-up
			return result{}, err
		}
	}
	var times, cpus, each, theirs, eachCPU []float64
	for i := range pairs {
		if i%20 == 0 {
			progress("%s beside %s: %d of %d pairs", a.name, b.name, i, pairs)
		}
		of, with, err := pair(ctx, ops, a, b)
		if err != nil {
			return result{}, err
		}
		times, cpus = append(times, of.time/with.time), append(cpus, of.cpu/with.cpu)
		each, theirs = append(each, of.time/float64(ops)), append(theirs, with.time/float64(ops))
		eachCPU = append(eachCPU, of.cpu/float64(ops))
	}
	return result{
		time: median(times), cpu: median(cpus),
		each: time.Duration(median(each).Center), with: time.Duration(median(theirs).Center),
		eachCPU: time.Duration(median(eachCPU).Center),
	}, nil
}

// pair runs a round of each, in random order.
func pair(ctx context.Context, ops int, a, b contestant) (of, with cost, err error) {
	swapped := rand.N(2) == 1
	if swapped {
		a, b = b, a
	}
	if of, err = round(ctx, ops, a.op); err != nil {
		return of, with, err
	}
	if with, err = round(ctx, ops, b.op); err != nil {
		return of, with, err
	}
	if swapped {
		of, with = with, of
	}
	return of, with, nil
}

func round(ctx context.Context, ops int, op func() error) (cost, error) {
	if err := ctx.Err(); err != nil {
		return cost{}, err
	}
	start, cpu := time.Now(), cpuTime()
	if err := repeat(ops, op); err != nil {
		return cost{}, err
	}
	return cost{float64(time.Since(start)), float64(max(cpuTime()-cpu, 1))}, nil
}
