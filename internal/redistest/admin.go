package redistest

import (
	"context"
	"slices"

	"github.com/redis/go-redis/v9"
)

// command asks a server something on a connection of its own.
func (s *Server) command(ctx context.Context, args ...any) *redis.Cmd {
	client := redis.NewClient(&redis.Options{Addr: s.addr})
	defer client.Close()
	return client.Do(ctx, args...)
}

func (s *Server) do(ctx context.Context, args ...any) error {
	return s.command(ctx, args...).Err()
}

func (s *Server) text(ctx context.Context, args ...any) (string, error) {
	return s.command(ctx, args...).Text()
}

// arg returns the value of an argument that the server was started with.
func (s *Server) arg(name string) string {
	return s.argv[slices.Index(s.argv, name)+1]
}
