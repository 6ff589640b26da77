package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// server returns the URL of a Redis, and what ends it if it was started here.
func server(ctx context.Context) (url string, stop func(), err error) {
	if url = os.Getenv("REDIS_URL"); url != "" {
		if !strings.HasPrefix(url, "redis://") {
			return "", nil, errors.New("REDIS_URL: only redis:// can be measured, as connections are counted and delayed on the way")
		}
		return url, func() {}, ping(ctx, url)
	}
	s, err := startServer(ctx)
	if err != nil {
		return "", nil, err
	}
	return s.url, s.stop, nil
}

// local is a redis-server that was started here.
type local struct {
	url string
	dir string
	cmd *exec.Cmd
}

// startServer runs a server that keeps nothing; args are those of its command line.
func startServer(ctx context.Context, args ...string) (*local, error) {
	bin, err := exec.LookPath("redis-server")
	if err != nil {
		return nil, errors.New("no redis-server here: set REDIS_URL, or install one (Debian: apt-get install redis-server)")
	}
	dir, err := os.MkdirTemp("", "lock-bench-server-")
	if err != nil {
		return nil, err
	}
	s := &local{dir: dir}
	if err := s.start(ctx, bin, args); err != nil {
		s.stop()
		return nil, err
	}
	return s, nil
}

func (s *local) start(ctx context.Context, bin string, args []string) error {
	port, err := freePort()
	if err != nil {
		return err
	}
	s.url = "redis://127.0.0.1:" + port
	s.cmd = exec.Command(bin, append([]string{
		"--port", port, "--bind", "127.0.0.1", "--dir", s.dir, "--save", "", "--appendonly", "no",
	}, args...)...)
	var out bytes.Buffer
	s.cmd.Stdout, s.cmd.Stderr = &out, &out
	if err := s.cmd.Start(); err != nil {
		return err
	}
	if err := ping(ctx, s.url); err != nil {
		s.stop()
		return fmt.Errorf("redis-server does not answer: %w\n%s", err, out.String())
	}
	return nil
}

func (s *local) stop() {
	if s.cmd != nil && s.cmd.Process != nil {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
	}
	_ = os.RemoveAll(s.dir)
}

// freePort picks a port for which the one of a cluster's bus, which is 10000 above, is free too.
func freePort() (string, error) {
	var err error
	for range 100 {
		port := 10000 + rand.N(20000)
		if err = free(port); err == nil {
			err = free(port + 10000)
		}
		if err == nil {
			return strconv.Itoa(port), nil
		}
	}
	return "", err
}

func free(port int) error {
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return err
	}
	return l.Close()
}

func ping(ctx context.Context, url string) error {
	rdb, err := client(url, true)
	if err != nil {
		return err
	}
	defer rdb.Close()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for {
		err := rdb.Ping(ctx).Err()
		if err == nil || ctx.Err() != nil {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// client returns a client of the server at url, with default settings but for ContextTimeoutEnabled.
func client(url string, contextTimeout bool) (*redis.Client, error) {
	o, err := redis.ParseURL(url)
	if err != nil {
		return nil, err
	}
	o.ContextTimeoutEnabled = contextTimeout
	return redis.NewClient(o), nil
}
