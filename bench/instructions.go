package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
)

// Instructions are counted by callgrind, which is the same on every machine: processors in the cloud often have no counters
// to be read. A child process does the work under it, once with few operations and once with more: the difference is
// what they cost.
const (
	fewOps  = 500
	moreOps = 1500
)

// repeatJob is work for a child: one of the pairings, again and again.
type repeatJob struct {
	URL, Kind, Client string
	Ops               int
}

func (j repeatJob) run() (any, error) {
	cases, closeAll, err := uncontendedCases(context.Background(), config{url: j.URL})
	if err != nil {
		return nil, err
	}
	defer closeAll()
	for _, k := range cases {
		if k.kind == j.Kind && k.client == j.Client {
			return nil, repeat(j.Ops, k.a.op)
		}
	}
	return nil, fmt.Errorf("no work %q", j.Kind)
}

func countsInstructions(c config) bool {
	_, err := exec.LookPath("valgrind")
	return err == nil && c.instructions
}

func instructionsText(c config) string {
	if countsInstructions(c) {
		return "Instructions are those of the process outside the kernel, counted by callgrind in a run without garbage collection."
	}
	return "Instructions are not counted: that takes valgrind, and is left out with `-quick`."
}

// instructions returns what one operation costs, or "" if that can't be told.
func instructions(ctx context.Context, c config, kind, client string) string {
	if !countsInstructions(c) {
		return ""
	}
	progress("counting instructions: %s, %s", kind, client)
	few, ok := callgrind(ctx, job{Repeat: &repeatJob{c.url, kind, client, fewOps}})
	more, okMore := callgrind(ctx, job{Repeat: &repeatJob{c.url, kind, client, moreOps}})
	if !ok || !okMore {
		return "?"
	}
	return fmt.Sprint((more - few) / (moreOps - fewOps))
}

var collected = regexp.MustCompile(`Collected : (\d+)`)

// callgrind counts the instructions of a child. Go's signals to itself, and several threads at a time, are more than it
// can take now and then; hence the settings, and more than one try.
func callgrind(ctx context.Context, j job) (int, bool) {
	exe, err := os.Executable()
	if err != nil {
		return 0, false
	}
	for range 3 {
		cmd := exec.CommandContext(ctx, "valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", exe)
		cmd.Env = append(j.environment(), "GODEBUG=asyncpreemptoff=1", "GOMAXPROCS=1", "GOGC=off")
		var out strings.Builder
		cmd.Stderr = &out
		if cmd.Run() != nil {
			continue
		}
		if m := collected.FindStringSubmatch(out.String()); m != nil {
			n, err := strconv.Atoi(m[1])
			return n, err == nil
		}
	}
	return 0, false
}
