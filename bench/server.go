package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"time"

	"github.com/redis/go-redis/v9"
)

// server returns the URL of a Redis, and what ends it if it was started here.
func server(ctx context.Context) (url string, stop func(), err error) {
	if url = os.Getenv("REDIS_URL"); url != "" {
		return url, func() {}, nil
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
	cmd *exec.Cmd
}

func startServer(ctx context.Context) (*local, error) {
	bin, err := exec.LookPath("redis-server")
	if err != nil {
		return nil, errors.New("no redis-server here: set REDIS_URL, or install one (Debian: apt-get install redis-server)")
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	s := &local{
		url: "redis://127.0.0.1:" + port,
		cmd: exec.Command(bin, "--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"),
	}
	s.cmd.Stdout, s.cmd.Stderr = &out, &out
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	if err := ping(ctx, s.url); err != nil {
		s.stop()
		return nil, fmt.Errorf("redis-server does not answer: %w\n%s", err, out.String())
	}
	return s, nil
}

func (s *local) stop() {
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
}

func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, err
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
