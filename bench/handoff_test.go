package main

import (
	"context"
	"testing"
	"testing/synctest"
)

func TestTheLimitOfARoundAllowsForItsWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		held := make(chan struct{}, 1)
		s := &session{lock: func(ctx context.Context, _ string) (func() error, error) {
			select {
			case held <- struct{}{}:
				return func() error { <-held; return nil }, nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}}
		times, err := toAndFro(s, s, 50, waitsAfar)(t.Context())
		if err != nil || len(times) != 50 {
			t.Fatal(len(times), err)
		}
	})
}
