package main

import (
	"fmt"
	"os"
	"time"
)

// What is shown on stderr while a scenario runs: one line that is written over, or a line now and then where stderr is a
// file. Only the goroutine that runs the scenarios touches it.
var shown struct {
	stage    string
	began    time.Time
	last     time.Time
	terminal bool
}

const quietTime = 15 * time.Second // between two lines in a file

// stage says which scenario runs.
func stage(i, n int, name string) {
	info, err := os.Stderr.Stat()
	shown.terminal = err == nil && info.Mode()&os.ModeCharDevice != 0
	if shown.began.IsZero() {
		shown.began = time.Now()
	}
	shown.stage, shown.last = fmt.Sprintf("%d/%d %s", i, n, name), time.Time{}
	progress("begins")
}

// progress says how far the scenario is.
func progress(format string, args ...any) {
	now := time.Now()
	if shown.stage == "" || (!shown.terminal && now.Sub(shown.last) < quietTime) {
		return
	}
	shown.last = now
	begin, end := "", "\n"
	if shown.terminal {
		begin, end = "\r\033[K", ""
	}
	fmt.Fprintf(os.Stderr, "%s[%v, %s] %s%s", begin, now.Sub(shown.began).Round(time.Second), shown.stage, fmt.Sprintf(format, args...), end)
}

// endProgress makes room for what comes next.
func endProgress() {
	if shown.terminal {
		fmt.Fprint(os.Stderr, "\r\033[K")
	}
}
