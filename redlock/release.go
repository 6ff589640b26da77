package redlock

import (
	"context"
	"errors"
	"fmt"

	"github.com/seed-b640e7e9/lock"
)

// Release gives the token up everywhere. It answers when the quorum is decided; nodes that fail are tried again in the
// background, for as long as the key may last there.
func (q *quorum) Release(ctx context.Context, r lock.Request) (lock.Reply, error) {
	r.Limit = patience(r.TTL)
	v := q.release(ctx, r, q.all, q.need)
	defer v.free()
	v.wait(ctx)
	if !v.won() {
		err := v.loss(ctx)
		if !errors.Is(err, lock.ErrLost) && !errors.Is(err, lock.ErrUnknown) && !lock.IsPermanent(err) {
			err = fmt.Errorf("%w: %w", lock.ErrUnknown, err) // it goes on in the background
		}
		return lock.Reply{}, err
	}
	reply := lock.Reply{Listeners: v.listeners()}
	for i, a := range v.answers {
		if v.yes.has(i) && a.reply.Mute != nil {
			reply.Mute = a.reply.Mute
		}
	}
	return reply, nil
}
