package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/redis/go-redis/v9"
)

// introduction says when, with what and on what machine the figures were measured.
func introduction(ctx context.Context, c config) (string, error) {
	rdb, err := client(c.url, true)
	if err != nil {
		return "", err
	}
	defer rdb.Close()
	version, err := serverVersion(ctx, rdb)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	if c.quick {
		b.WriteString("**Measured with `-quick`: not for quoting.**\n\n")
	}
	command := strings.Join(append([]string{"go run ."}, os.Args[1:]...), " ")
	fmt.Fprintf(&b, "- %s, `%s`\n", time.Now().Format("2 January 2006"), command)
	fmt.Fprintf(&b, "- %s, %s\n", strings.Replace(runtime.Version(), "go", "Go ", 1), strings.Join(versions(), ", "))
	fmt.Fprintf(&b, "- %s\n", version)
	fmt.Fprintf(&b, "- %s, GOMAXPROCS %d, %s\n\n", processor(), runtime.GOMAXPROCS(0), kernel())
	return b.String(), nil
}

// versions returns the modules that are compared.
func versions() []string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return nil
	}
	short := map[string]string{
		"github.com/redis/go-redis/v9":     "go-redis",
		"github.com/bsm/redislock":         "bsm/redislock",
		"github.com/go-redsync/redsync/v4": "redsync",
		"github.com/redis/rueidis":         "rueidislock",
	}
	var list []string
	for _, m := range info.Deps {
		if name := short[m.Path]; name != "" {
			list = append(list, name+" "+strings.TrimPrefix(m.Version, "v"))
		}
	}
	return list
}

func serverVersion(ctx context.Context, rdb *redis.Client) (string, error) {
	text, err := rdb.Info(ctx, "server").Result()
	if err != nil {
		return "", err
	}
	if v := field(text, "valkey_version"); v != "" {
		return "Valkey " + v, nil
	}
	return "Redis " + field(text, "redis_version"), nil
}

// field returns the value of a line "name:value" of INFO, or of one "name : value" of /proc/cpuinfo.
func field(text, name string) string {
	for line := range strings.Lines(text) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// infoNumber returns a number that INFO tells.
func infoNumber(ctx context.Context, rdb *redis.Client, section, name string) (float64, error) {
	text, err := rdb.Info(ctx, section).Result()
	if err != nil {
		return 0, err
	}
	return strconv.ParseFloat(field(text, name), 64)
}

// processor returns the model, and how many of them there are.
func processor() string {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return runtime.GOARCH
	}
	cores := 0
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "processor\t") {
			cores++
		}
	}
	return fmt.Sprintf("%s, %d cores", field(string(text), "model name"), cores)
}

func kernel() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return runtime.GOOS
	}
	text := func(b []byte) string { return string(bytes.TrimRight(b, "\x00")) }
	return text(u.Sysname[:]) + " " + text(u.Release[:])
}
