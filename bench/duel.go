package main

import (
	"context"
	"fmt"
	"math/rand/v2"

	"github.com/seed-b640e7e9/lock/bench/internal/report"
)

const stallShare = 0.1 // of a peer's usual rate: with less a round has seen it stall

// duel compares ours with rueidislock, whose waiters are woken too, in short rounds.
func duel(ctx context.Context, c config) (report.Table, []report.Target, error) {
	const goroutines = 8
	sides := []peer{peerOf(us), peerOf(usFenced), peerOf(byRueidis)}
	k := contention{Goroutines: goroutines, Each: c.each / 4}
	rounds := max(c.rounds/2, 10)
	t := report.Table{
		Text: fmt.Sprintf("%d goroutines, nothing to do, %d rounds of %v in random order. Rounds in which one has less than a tenth of its "+
			"usual rate are left out, as stalls:", goroutines, rounds, k.Each),
		Head: []string{"", "sections a second", "of rueidislock, median (95 % interval)", "stalls"},
	}
	rates := make([][]float64, len(sides))
	for n := range rounds {
		progress("beside rueidislock: %d of %d rounds", n, rounds)
		for _, i := range rand.Perm(len(sides)) {
			k.Name = newName()
			tally, err := contend(ctx, sides[i], c.url, &wire{}, k)
			if err != nil {
				return t, nil, err
			}
			rates[i] = append(rates[i], tally.rate())
		}
		if ctx.Err() != nil {
			return t, nil, ctx.Err()
		}
	}
	rates, stalls := withoutStalls(rates)
	var targets []report.Target
	for i, p := range sides {
		r := ratios(rates[i], rates[len(sides)-1])
		t.Add(p.name, fmt.Sprintf("%.0f", median(rates[i]).Center), interval(r, 1), fmt.Sprint(stalls[i]))
		if i < 2 {
			limit := []float64{30, 15}[i]
			targets = append(targets, report.AtLeast("contended, 8 goroutines: "+p.name+", sections of rueidislock's", limit, r.Center, interval(r, 1)))
		}
	}
	return t, targets, nil
}

// withoutStalls leaves out the rounds in which anyone stalled, and counts them for each.
func withoutStalls(rates [][]float64) (good [][]float64, stalls []int) {
	good, stalls = make([][]float64, len(rates)), make([]int, len(rates))
	usual := make([]float64, len(rates))
	for i := range rates {
		usual[i] = median(rates[i]).Center
	}
	for n := range rates[0] {
		fine := true
		for i := range rates {
			if rates[i][n] < stallShare*usual[i] {
				stalls[i]++
				fine = false
			}
		}
		for i := range rates {
			if fine {
				good[i] = append(good[i], rates[i][n])
			}
		}
	}
	return good, stalls
}
