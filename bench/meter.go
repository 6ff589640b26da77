package main

import (
	"fmt"
	"math"
	"runtime"
	"slices"
	"time"

	"golang.org/x/perf/benchmath"
	"golang.org/x/sys/unix"
)

// heap returns the bytes in use. It collects twice, as pools give up what they keep at the second time only.
func heap() float64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}

// cpuTime returns what this process has used of processors, for itself and in the kernel.
func cpuTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// allocated is what one operation takes from the heap.
type allocated struct{ count, bytes float64 }

// allocs measures an operation, done n times after a warm-up.
func allocs(n int, op func() error) (allocated, error) {
	var before, after runtime.MemStats
	if err := repeat(n, op); err != nil {
		return allocated{}, err
	}
	runtime.ReadMemStats(&before)
	if err := repeat(n, op); err != nil {
		return allocated{}, err
	}
	runtime.ReadMemStats(&after)
	return allocated{
		count: float64(after.Mallocs-before.Mallocs) / float64(n),
		bytes: float64(after.TotalAlloc-before.TotalAlloc) / float64(n),
	}, nil
}

func repeat(n int, op func() error) error {
	for range n {
		if err := op(); err != nil {
			return err
		}
	}
	return nil
}

// median is the median with its 95 % interval, whatever the distribution. It leaves the values as they are: rounds are
// compared one by one, and NewSample sorts.
func median(values []float64) benchmath.Summary {
	return benchmath.AssumeNothing.Summary(benchmath.NewSample(slices.Clone(values), &benchmath.DefaultThresholds), 0.95)
}

// ratios is the median of a's to b's, round by round, of those that have both.
func ratios(a, b []float64) benchmath.Summary {
	var all []float64
	for i := range min(len(a), len(b)) {
		if r := a[i] / b[i]; !math.IsNaN(r) {
			all = append(all, r)
		}
	}
	if len(all) == 0 {
		return benchmath.Summary{Center: math.NaN(), Lo: math.Inf(-1), Hi: math.Inf(1)}
	}
	return median(all)
}

// interval shows a median with its 95 % interval, if there are enough values for one.
func interval(s benchmath.Summary, digits int) string {
	if math.IsInf(s.Lo, 0) || math.IsInf(s.Hi, 0) {
		return fmt.Sprintf("%.*f", digits, s.Center)
	}
	return fmt.Sprintf("%.*f (%.*f - %.*f)", digits, s.Center, digits, s.Lo, digits, s.Hi)
}

// at returns a quantile of sorted times, zero if there are none.
func at(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[int(q*float64(len(sorted)-1))]
}

// brief rounds a time to three digits or so.
func brief(d time.Duration) string {
	unit := time.Nanosecond
	for d >= 1000*unit {
		unit *= 10
	}
	return d.Round(unit).String()
}
