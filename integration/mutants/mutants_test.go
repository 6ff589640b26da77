package mutants

import (
	"context"
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// library is the root of the library's module.
func library(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../..")
	require.NoError(t, err)
	require.FileExists(t, filepath.Join(dir, "lock.go"))
	return dir
}

// goTest runs go test in the library's module, and kills it with all its children when that takes too long. To build quickly
// counts for more than to run quickly.
func goTest(t *testing.T, args ...string) (output string, passed bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute) // to build takes longer than the test's own minute
	defer cancel()
	cmd := exec.CommandContext(ctx, "go", append([]string{"test", "-vet=off", "-gcflags=-N -l", "-ldflags=-s -w", "-count=1", "-timeout=60s"}, args...)...)
	cmd.Dir = library(t)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.CombinedOutput()
	require.NoError(t, ctx.Err(), "killed")
	if err != nil {
		var exit *exec.ExitError
		require.ErrorAs(t, err, &exit)
	}
	return string(out), err == nil
}

// pattern is what -run needs to find the test, or the subtest, and no other.
func (m *Mutant) pattern() string {
	var parts []string
	for part := range strings.SplitSeq(m.Run, "/") {
		parts = append(parts, "^"+regexp.QuoteMeta(part)+"$")
	}
	return strings.Join(parts, "/")
}

// overlay writes the mutated files, and the list that go test takes them by.
func (m *Mutant) overlay(t *testing.T) string {
	t.Helper()
	dir, files := library(t), map[string]string{}
	for _, e := range m.All() {
		path := filepath.Join(dir, e.File)
		text, ok := files[path]
		if !ok {
			b, err := os.ReadFile(path)
			require.NoError(t, err)
			text = string(b)
		}
		require.Equal(t, 1, strings.Count(text, e.Old), "in %s, of: %s", e.File, e.Old)
		require.NotEqual(t, e.Old, e.New)
		files[path] = strings.Replace(text, e.Old, e.New, 1)
	}
	tmp, replace := t.TempDir(), map[string]string{}
	for path, text := range files {
		replace[path] = filepath.Join(tmp, strconv.Itoa(len(replace))+"_"+filepath.Base(path))
		require.NoError(t, os.WriteFile(replace[path], []byte(text), 0o600))
	}
	list, err := json.Marshal(map[string]any{"Replace": replace})
	require.NoError(t, err)
	name := filepath.Join(tmp, "overlay.json")
	require.NoError(t, os.WriteFile(name, list, 0o600))
	return name
}

var (
	failedTest = regexp.MustCompile(`(?m)^\s*--- FAIL: (\S+) \((\S+)\)`)
	noise      = regexp.MustCompile(`(?m)^(\s*(---|===|Error|panic)|FAIL|ok|.*\.go:\d+:).*$`)
)

// brief is what matters of an output, which may hold the stacks of thousands of goroutines.
func brief(output string) string {
	lines := noise.FindAllString(output, 20)
	if len(lines) == 0 {
		return output[:min(len(output), 2000)]
	}
	return strings.Join(lines, "\n")
}

func TestEveryMutantIsCaught(t *testing.T) {
	names := map[string]bool{}
	for _, m := range All {
		require.False(t, names[m.Name], "%s is there twice", m.Name)
		names[m.Name] = true
		t.Run(m.Name, func(t *testing.T) {
			start := time.Now()
			output, passed := goTest(t, "-failfast", "-overlay", m.overlay(t), "-run", m.pattern(), m.Package)
			require.NotContains(t, output, "[build failed]", brief(output))
			require.NotContains(t, output, "[setup failed]", brief(output))
			require.NotContains(t, output, "no tests to run")
			require.False(t, passed, "%s does not notice", m.Run)
			require.NotContains(t, output, "test timed out", brief(output))
			failed := failedTest.FindStringSubmatch(output)
			require.NotNil(t, failed, "no test has failed: %s", brief(output))
			require.Equal(t, strings.Split(m.Run, "/")[0], strings.Split(failed[1], "/")[0])
			t.Logf("caught by %s of %s, which took %s; with building %.1fs", m.Run, m.Package, failed[2], time.Since(start).Seconds())
		})
	}
}

// The same tests pass on the library as it is: else that they fail on a mutant says nothing.
func TestWhatCatchesTheMutantsPassesWithoutThem(t *testing.T) {
	patterns := map[string]map[string]string{}
	for _, m := range All {
		if patterns[m.Package] == nil {
			patterns[m.Package] = map[string]string{}
		}
		patterns[m.Package][m.pattern()] = m.Run
	}
	for pkg, tests := range patterns {
		output, passed := goTest(t, "-v", "-run", strings.Join(slices.Sorted(maps.Keys(tests)), "|"), pkg)
		require.True(t, passed, brief(output))
		for _, name := range tests {
			require.Contains(t, output, "--- PASS: "+name+" (", "it has not run")
		}
	}
}
