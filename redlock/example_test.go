package redlock_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/redlock"
)

func ExampleNew() {
	var nodes []redis.UniversalClient
	var servers []*miniredis.Miniredis // in memory; a service has its own three, on three machines
	for range 3 {
		server := miniredis.NewMiniRedis()
		if err := server.Start(); err != nil {
			panic(err)
		}
		defer server.Close()
		rdb := redis.NewClient(&redis.Options{Addr: server.Addr(), ContextTimeoutEnabled: true})
		defer rdb.Close()
		servers, nodes = append(servers, server), append(nodes, rdb)
	}
	locker := redlock.New(nodes)
	defer locker.Wait(context.Background())

	job := func(ctx context.Context) error {
		fmt.Println("settling accounts")
		return nil
	}
	servers[0].Close() // one of three may be down
	if err := locker.Do(context.Background(), "settlement", job); err != nil {
		fmt.Println("not done:", err)
	}

	servers[1].Close() // but not two
	err := locker.TryDo(context.Background(), "settlement", job)
	fmt.Println("no quorum:", errors.Is(err, redlock.ErrNoQuorum), "held by another:", errors.Is(err, lock.ErrHeld))
	var node *redlock.NodeError
	fmt.Println("of a node:", errors.As(err, &node))
	// Output:
	// settling accounts
	// no quorum: true held by another: false
	// of a node: true
}
