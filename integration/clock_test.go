package integration

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// shim moves the clock of a program by the milliseconds in a file.
const shim = `
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>

int gettimeofday(struct timeval *tv, void *tz) {
  static int (*real)(struct timeval *, void *);
  if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
  int result = real(tv, tz);
  long long ms = 0;
  FILE *f = fopen(getenv("CLOCK_OFFSET"), "r");
  if (f) {
    if (fscanf(f, "%lld", &ms) != 1) ms = 0;
    fclose(f);
  }
  long long us = tv->tv_sec * 1000000LL + tv->tv_usec + ms * 1000;
  tv->tv_sec = us / 1000000;
  tv->tv_usec = us % 1000000;
  return result;
}
`

// clockShim makes servers that are started until the test ends have a clock that the file moves which it returns.
func clockShim(t *testing.T, wanted bool) (offset string) {
	t.Helper()
	if !wanted {
		return ""
	}
	dir := t.TempDir()
	lib, source := filepath.Join(dir, "shim.so"), filepath.Join(dir, "shim.c")
	require.NoError(t, os.WriteFile(source, []byte(shim), 0o600))
	if _, err := exec.LookPath("gcc"); err != nil {
		msg := "no gcc here: apt-get install gcc"
		if os.Getenv("CI") == "true" {
			t.Fatal(msg)
		}
		t.Skip(msg)
	}
	out, err := exec.Command("gcc", "-shared", "-fPIC", "-o", lib, source, "-ldl").CombinedOutput()
	require.NoError(t, err, string(out))
	offset = filepath.Join(dir, "offset")
	require.NoError(t, os.WriteFile(offset, []byte("0"), 0o600))
	t.Setenv("LD_PRELOAD", lib)
	t.Setenv("CLOCK_OFFSET", offset)
	return offset
}

// clock moves the server's clock, and sees that it has moved: the workers need not notice.
func (n *nemesis) clock(by time.Duration) {
	next := n.offset + ".next"
	require.NoError(n.t, os.WriteFile(next, []byte(strconv.FormatInt(by.Milliseconds(), 10)), 0o600))
	require.NoError(n.t, os.Rename(next, n.offset))
	at, err := n.admin.Time(context.Background()).Result()
	require.NoError(n.t, err)
	require.WithinDuration(n.t, time.Now().Add(by), at, 5*time.Second, "the server's clock has not moved")
}
