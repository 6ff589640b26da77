package worker

import (
	"context"
	"database/sql"
	"errors"
	"strings"

	"github.com/redis/go-redis/v9"
	_ "modernc.org/sqlite"

	"github.com/seed-b640e7e9/lock"
	"github.com/seed-b640e7e9/lock/integration/history"
	"github.com/seed-b640e7e9/lock/internal/keys"
)

// register is a protected resource: a number for each name, that refuses fences lower than the highest it has seen. Both
// methods return what history calls the outcome.
type register interface {
	claim(ctx context.Context, name string, f lock.Fence) (value int64, outcome string)
	write(ctx context.Context, name string, f lock.Fence, value int64) (outcome string)
}

// openRegister opens the registers at a Redis or, if it is a path, in an SQLite database.
func openRegister(resource string) (register, func()) {
	if !strings.HasPrefix(resource, "/") {
		rdb := redis.NewClient(&redis.Options{Addr: resource})
		return inRedis{rdb}, func() { _ = rdb.Close() }
	}
	// Without fsync a commit survives the end of a process, and no machine ends here.
	db, err := sql.Open("sqlite", "file:"+resource+"?_pragma=busy_timeout(10000)&_pragma=synchronous(OFF)&_txlock=immediate")
	if err != nil {
		panic(err)
	}
	return inSQL{db}, func() { _ = db.Close() }
}

// CreateRegisters makes the database, before there are workers that use it.
func CreateRegisters(file string) error {
	db, err := sql.Open("sqlite", "file:"+file+"?_pragma=journal_mode(WAL)")
	if err != nil {
		return err
	}
	defer db.Close()
	_, err = db.Exec(`CREATE TABLE register (name TEXT PRIMARY KEY, value INTEGER, fence INTEGER)`)
	return err
}

type inRedis struct{ rdb *redis.Client }

// claimScript reads a register for a fence, which it remembers: lower ones are refused from then on, also in writing.
var claimScript = redis.NewScript(`
local seen = tonumber(redis.call('GET', KEYS[2]) or '0')
if tonumber(ARGV[1]) < seen then
  return 'stale'
end
redis.call('SET', KEYS[2], ARGV[1])
return redis.call('GET', KEYS[1]) or '0'
`)

func (r inRedis) claim(ctx context.Context, name string, f lock.Fence) (int64, string) {
	key := "register:" + name
	cmd := claimScript.Run(ctx, r.rdb, []string{key, keys.Mark(key)}, int64(f))
	if cmd.Err() == nil && cmd.Val() == "stale" {
		return 0, history.Stale
	}
	n, err := cmd.Int64()
	if err != nil {
		return 0, history.Unknown
	}
	return n, history.Accepted
}

func (r inRedis) write(ctx context.Context, name string, f lock.Fence, value int64) string {
	switch err := f.Set(ctx, r.rdb, "register:"+name, value); {
	case err == nil:
		return history.Accepted
	case errors.Is(err, lock.ErrStale):
		return history.Stale
	default:
		return history.Unknown
	}
}

type inSQL struct{ db *sql.DB }

func (r inSQL) claim(ctx context.Context, name string, f lock.Fence) (value int64, outcome string) {
	err := r.db.QueryRowContext(ctx, `INSERT INTO register VALUES (?, 0, ?)
		ON CONFLICT (name) DO UPDATE SET fence = excluded.fence WHERE register.fence <= excluded.fence RETURNING value`, name, int64(f)).Scan(&value)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return 0, history.Stale
	case err != nil:
		return 0, history.Unknown
	default:
		return value, history.Accepted
	}
}

func (r inSQL) write(ctx context.Context, name string, f lock.Fence, value int64) string {
	result, err := r.db.ExecContext(ctx, `UPDATE register SET value = ?, fence = ? WHERE name = ? AND fence <= ?`, value, int64(f), name, int64(f))
	if err != nil {
		return history.Unknown
	}
	if n, err := result.RowsAffected(); err != nil || n != 1 {
		return history.Stale
	}
	return history.Accepted
}
