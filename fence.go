package lock

import (
	"context"

	"github.com/redis/go-redis/v9"
	"github.com/seed-b640e7e9/lock/internal/call"
	"github.com/seed-b640e7e9/lock/internal/keys"
)

// Fence is a fencing token: a number that rises with every grant of a name, though not always by one. A resource that
// remembers the highest it has seen, and refuses lower ones, is safe from a holder that was paused and goes on after
// its lease has ended, which no lock can prevent (see Kleppmann, "How to do distributed locking", 2016).
//
// Zero means that the lock was taken without fencing.
type Fence int64

// setScript writes a value unless a newer fence has been seen.
//
//	KEYS   the value, the highest fence seen
//	ARGV   fence, value
//	reply  1, or 0 if the fence is stale
//
// A repeat writes the same again. Fences are compared by length and then bytes: as numbers they would be exact up to
// 2^53 only, and as plain strings "9" would be above "10".
var setScript = newScript(`
local seen = redis.call('GET', KEYS[2])
if seen and (#seen > #ARGV[1] or (#seen == #ARGV[1] and seen > ARGV[1])) then
  return 0
end
redis.call('SET', KEYS[2], ARGV[1])
redis.call('SET', KEYS[1], ARGV[2])
return 1
`)

// Set writes value to key in Redis unless a holder with a newer fence has written there before, atomically. As SET does,
// it replaces whatever is there, and its TTL. The same fence may write again and again. It is what a protected resource does, for a resource that is a Redis value; README
// shows the same in SQL.
//
// The highest fence seen is kept at a second key of the same cluster slot, key followed by ":fenced" and, if key has no
// hash tag, by ":{key}"; for a key with braces that are no tag it is one that begins with "fenced:", or that has a number
// in the braces. It has no TTL: deleting it lets stale holders write again.
//
// The error is an *Error that matches ErrStale if the write was refused, ErrNoFence if f is zero, and ErrUnknown if no
// answer came: then writing again is safe, and the write may also happen late, but never after one with a newer fence.
// Set may be called concurrently.
func (f Fence) Set(ctx context.Context, rdb redis.UniversalClient, key string, value any) error {
	if f <= 0 {
		return &Error{Op: "write", Name: key, Err: ErrNoFence}
	}
	s, m := single{client: call.NewBatcher(call.New(rdb))}, &evalMessage{}
	args := append(m.call(setScript, 2), key, keys.Mark(key), int64(f), value)
	reply, err := s.eval(ctx, m, setScript, args, 0)
	if err == nil && reply != int64(1) {
		err = ErrStale
	}
	if err != nil {
		return &Error{Op: "write", Name: key, Err: err}
	}
	return nil
}
