package main

import (
	"context"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/seed-b640e7e9/lock/bench/internal/report"
)

func TestMain(m *testing.M) {
	if text := os.Getenv(childJob); text != "" { // a scenario has started this binary
		exit(child(text))
	}
	os.Exit(m.Run())
}

// needServer skips the test where there is no redis-server. In CI there must be one.
func needServer(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("redis-server"); err == nil {
		return
	}
	if os.Getenv("CI") == "true" {
		t.Fatal("no redis-server")
	}
	t.Skip("no redis-server here (Debian: apt-get install redis-server)")
}

func TestEachScenarioRunsThrough(t *testing.T) {
	needServer(t)
	t.Setenv("REDIS_URL", "")
	c, names, err := settings([]string{
		"-quick", "-pairs", "8", "-ops", "6", "-rounds", "3", "-each", "30ms", "-hold", "200ms", "-hold-ttl", "500ms",
		"-goroutines", "2,64", "-processes", "2", "-locks", "1,200", "-waiters", "1,50", "-names", "1,50", "-held", "1,50",
	})
	if err != nil {
		t.Fatal(err)
	}
	url, stop, err := server(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	c.url = url
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			s, err := find(name)(ctx, c)
			if err != nil {
				t.Fatal(err)
			}
			checkSection(t, s)
		})
	}
}

func checkSection(t *testing.T, s report.Section) {
	t.Helper()
	if s.Title == "" || s.Text == "" || len(s.Tables) == 0 {
		t.Errorf("it says little: %q, %q, %d tables", s.Title, s.Text, len(s.Tables))
	}
	for _, table := range s.Tables {
		if len(table.Rows) == 0 {
			t.Errorf("no rows under %q", table.Head)
		}
		for _, row := range table.Rows {
			if len(row) != len(table.Head) {
				t.Errorf("%q has other columns than %q", row, table.Head)
			}
		}
	}
	for _, c := range s.Charts {
		if _, err := c.SVG(); err != nil {
			t.Errorf("%s: %v", c.Name, err)
		}
	}
}

func TestQuickKeepsWhatIsSet(t *testing.T) {
	c, names, err := settings([]string{"-quick", "-locks", "5", "handoff"})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(c.locks, sizes{5}) || c.pairs != 40 || c.instructions || !slices.Equal(names, []string{"handoff"}) {
		t.Errorf("%+v, %v", c, names)
	}
	if _, _, err := settings([]string{"nonsense"}); err == nil {
		t.Error("a scenario that does not exist")
	}
}

func TestCommandsAreCounted(t *testing.T) {
	c := counted{wire: &wire{}}
	text := "*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$4\r\n*1\r\n\r\n*1\r\n$4\r\nPING\r\n"
	for i := range text { // however it is cut
		c.count([]byte(text[i : i+1]))
	}
	if n := c.wire.commands.Load(); n != 2 {
		t.Errorf("%d commands, not 2", n)
	}
}

func TestRoundsWithAStallAreLeftOut(t *testing.T) {
	good, stalls := withoutStalls([][]float64{{100, 90, 110, 100}, {50, 0, 55, 50}})
	if !slices.Equal(good[0], []float64{100, 110, 100}) || !slices.Equal(good[1], []float64{50, 55, 50}) {
		t.Errorf("left: %v", good)
	}
	if !slices.Equal(stalls, []int{0, 1}) {
		t.Errorf("stalls: %v", stalls)
	}
}

func TestFairness(t *testing.T) {
	even, hog := tally{Sections: []int{5, 5, 5, 5}}, tally{Sections: []int{20, 0, 0, 0}}
	if even.jain() != 1 || hog.jain() != 0.25 {
		t.Errorf("%v and %v", even.jain(), hog.jain())
	}
}
