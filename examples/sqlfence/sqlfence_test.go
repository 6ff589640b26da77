package sqlfence

import (
	"context"
	"database/sql"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/seed-b640e7e9/lock"
)

// newDB returns a database with one account, "alice", that has 100.
func newDB(t *testing.T) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(t.TempDir(), "db")+"?_pragma=busy_timeout(10000)&_pragma=journal_mode(WAL)")
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, db.Close()) })
	_, err = db.Exec(Schema)
	require.NoError(t, err)
	_, err = db.Exec(`INSERT INTO account (id, balance) VALUES ('alice', 100)`)
	require.NoError(t, err)
	return db
}

func row(t *testing.T, db *sql.DB) (balance int64, fence lock.Fence) {
	t.Helper()
	require.NoError(t, db.QueryRow(`SELECT balance, fence FROM account WHERE id = 'alice'`).Scan(&balance, &fence))
	return balance, fence
}

// newRedis returns a server and clients on it, one for each process that the test plays.
func newRedis(t *testing.T) (m *miniredis.Miniredis, client func() *redis.Client) {
	t.Helper()
	m = miniredis.RunT(t)
	return m, func() *redis.Client {
		rdb := redis.NewClient(&redis.Options{Addr: m.Addr(), ContextTimeoutEnabled: true})
		t.Cleanup(func() { assert.NoError(t, rdb.Close()) })
		return rdb
	}
}

func TestHolderThatHasLostItsLeaseCanNotWriteAfterTheNext(t *testing.T) {
	ctx, db := t.Context(), newDB(t)
	m, client := newRedis(t)
	a := lock.New(client(), lock.WithFencing())
	b := lock.New(client(), lock.WithFencing())

	old, err := a.Acquire(ctx, "account:alice")
	require.NoError(t, err)
	require.NoError(t, Write(ctx, db, "alice", 90, old.Fence()))

	m.FastForward(time.Minute) // as if A had stood still for longer than its lease lasts
	next, err := b.Acquire(ctx, "account:alice")
	require.NoError(t, err)
	require.Greater(t, next.Fence(), old.Fence())
	require.NoError(t, Write(ctx, db, "alice", 70, next.Fence()))

	err = Write(ctx, db, "alice", 80, old.Fence())
	require.ErrorIs(t, err, lock.ErrStale)
	require.NotErrorIs(t, err, ErrNoAccount)
	balance, fence := row(t, db)
	assert.EqualValues(t, 70, balance)
	assert.Equal(t, next.Fence(), fence)

	require.NoError(t, Write(ctx, db, "alice", 60, next.Fence()), "a holder may write twice")
	balance, _ = row(t, db)
	assert.EqualValues(t, 60, balance)
	require.ErrorIs(t, old.Release(ctx), lock.ErrLost)
	require.NoError(t, next.Release(ctx))
}

func TestStaleHolderMayWriteUntilTheNextHas(t *testing.T) {
	ctx, db := t.Context(), newDB(t)
	require.NoError(t, Write(ctx, db, "alice", 1, 7))
	require.NoError(t, Write(ctx, db, "alice", 2, 7), "8 has been granted perhaps, but the row can't know")
	require.NoError(t, Write(ctx, db, "alice", 3, 8))
	require.ErrorIs(t, Write(ctx, db, "alice", 4, 7), lock.ErrStale)
	balance, fence := row(t, db)
	assert.EqualValues(t, 3, balance)
	assert.EqualValues(t, 8, fence)
}

func TestFencesAreComparedAsNumbers(t *testing.T) {
	ctx, db := t.Context(), newDB(t)
	for _, fence := range []lock.Fence{9, 10, 1<<53 + 1, 1<<53 + 2, 1<<63 - 1} {
		require.NoError(t, Write(ctx, db, "alice", int64(fence), fence))
		require.ErrorIs(t, Write(ctx, db, "alice", 0, fence-1), lock.ErrStale)
		balance, _ := row(t, db)
		require.EqualValues(t, fence, balance)
	}
}

func TestNoSuchAccountIsNotStale(t *testing.T) {
	err := Write(t.Context(), newDB(t), "nobody", 1, 1)
	require.ErrorIs(t, err, ErrNoAccount)
	require.NotErrorIs(t, err, lock.ErrStale)
}

func TestWriteWithoutFenceIsRefused(t *testing.T) {
	db := newDB(t)
	require.ErrorIs(t, Write(t.Context(), db, "alice", 1, 0), lock.ErrNoFence)
	balance, _ := row(t, db)
	assert.EqualValues(t, 100, balance)
}

func TestDatabaseErrorsAreNeitherStaleNorMissing(t *testing.T) {
	db := newDB(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := Write(ctx, db, "alice", 1, 1)
	require.ErrorIs(t, err, context.Canceled)
	require.NotErrorIs(t, err, lock.ErrStale)

	_, err = db.Exec(`DROP TABLE account`)
	require.NoError(t, err)
	err = Write(t.Context(), db, "alice", 1, 1)
	require.Error(t, err)
	require.NotErrorIs(t, err, lock.ErrStale)
	require.NotErrorIs(t, err, ErrNoAccount)
}

// The statement alone, without any lock: whatever the order in which writers arrive, the highest fence stays.
func TestOfConcurrentWritersTheNewestStays(t *testing.T) {
	ctx, db := t.Context(), newDB(t)
	const writers = 32
	errs := make([]error, writers+1)
	var wg sync.WaitGroup
	for _, f := range rand.Perm(writers) {
		fence := lock.Fence(f + 1)
		wg.Go(func() { errs[fence] = Write(ctx, db, "alice", int64(fence)*10, fence) })
	}
	wg.Wait()
	require.NoError(t, errs[writers], "nobody has a newer fence")
	for _, err := range errs[1:] {
		if err != nil {
			require.ErrorIs(t, err, lock.ErrStale)
		}
	}
	balance, fence := row(t, db)
	assert.EqualValues(t, writers*10, balance)
	assert.EqualValues(t, writers, fence)
}

// Under the lock, several processes read and write one row, and one of them is slow: what it writes after its lease has
// ended is refused, and no other write is lost.
func TestUnderTheLockEveryAcceptedWriteCounts(t *testing.T) {
	ctx, db := t.Context(), newDB(t)
	m, client := newRedis(t)
	deposit := func(ctx context.Context, amount int64, beforeWrite func()) error {
		held, _ := lock.FromContext(ctx)
		var balance int64
		if err := db.QueryRowContext(ctx, `SELECT balance FROM account WHERE id = 'alice'`).Scan(&balance); err != nil {
			return err
		}
		beforeWrite()
		return Write(context.WithoutCancel(ctx), db, "alice", balance+amount, held.Fence())
	}

	slow := lock.New(client(), lock.WithFencing())
	err := slow.Do(ctx, "account:alice", func(inner context.Context) error {
		return deposit(inner, 1000, func() {
			m.FastForward(time.Minute)
			var wg sync.WaitGroup
			for range 4 {
				locker := lock.New(client(), lock.WithFencing())
				wg.Go(func() {
					for range 5 {
						assert.NoError(t, locker.Do(ctx, "account:alice", func(ctx context.Context) error {
							return deposit(ctx, 1, func() {})
						}))
					}
				})
			}
			wg.Wait()
		})
	})
	require.ErrorIs(t, err, lock.ErrStale, "the slow one is refused")
	require.ErrorIs(t, err, lock.ErrLost)
	balance, _ := row(t, db)
	assert.EqualValues(t, 100+4*5, balance)
}
