package main

import (
	"context"
	"fmt"
	"iter"
	"math/rand/v2"
	"time"

	"github.com/redis/go-redis/v9"
)

// accounts are the keys, after the prefix, that hold the balances in cents.
var accounts = [2]string{"alice", "bob"}

const opening cents = 1000_00

type cents int64

func (c cents) String() string {
	sign := ""
	if c < 0 {
		sign, c = "-", -c
	}
	return fmt.Sprintf("%s%d.%02d", sign, c/100, c%100)
}

// An order moves an amount from one account to the other.
type order struct {
	from, to int // indices of accounts
	amount   cents
}

// orders are what one worker has to carry out: the same again for the same seed, so the right balances are known.
func orders(seed uint64, worker, n int) iter.Seq[order] {
	return func(yield func(order) bool) {
		draw := rand.New(rand.NewPCG(seed, uint64(worker)))
		for range n {
			from := draw.IntN(2)
			if !yield(order{from: from, to: 1 - from, amount: 1 + cents(draw.IntN(100))}) {
				return
			}
		}
	}
}

// bank keeps the accounts in Redis, as plain values that are read and written: it needs a lock.
type bank struct {
	rdb    *redis.Client
	prefix string
}

// open sets all accounts to the opening balance.
func (b bank) open(ctx context.Context) error {
	for _, account := range accounts {
		if err := b.rdb.Set(ctx, b.prefix+account, int64(opening), 0).Err(); err != nil {
			return err
		}
	}
	return nil
}

func (b bank) transfer(ctx context.Context, o order) error {
	if err := b.add(ctx, accounts[o.from], -o.amount); err != nil {
		return err
	}
	return b.add(ctx, accounts[o.to], o.amount)
}

// add reads a balance, thinks, and writes it: whatever others write in between is overwritten.
func (b bank) add(ctx context.Context, account string, amount cents) error {
	balance, err := b.rdb.Get(ctx, b.prefix+account).Int64()
	if err != nil {
		return err
	}
	time.Sleep(rand.N(2 * time.Millisecond))
	return b.rdb.Set(ctx, b.prefix+account, balance+int64(amount), 0).Err()
}

func (b bank) balances(ctx context.Context) (balances [2]cents, err error) {
	for i, account := range accounts {
		balance, err := b.rdb.Get(ctx, b.prefix+account).Int64()
		if err != nil {
			return balances, err
		}
		balances[i] = cents(balance)
	}
	return balances, nil
}

// expected returns the balances that there must be when all workers have carried out all orders.
func expected(seed uint64, workers, transfers int) [2]cents {
	balances := [2]cents{opening, opening}
	for w := range workers {
		for o := range orders(seed, w, transfers) {
			balances[o.from] -= o.amount
			balances[o.to] += o.amount
		}
	}
	return balances
}
