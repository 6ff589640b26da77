// Package sqlfence does for a row of an SQL table what lock.Fence.Set does for a value in Redis: a holder whose lease
// has ended, and who does not know it yet, can't overwrite what a later holder wrote.
package sqlfence

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/seed-b640e7e9/lock"
)

// Schema is the table. The fence column keeps the highest fence that has written the row; it begins at zero, which is
// below every fence.
const Schema = `
CREATE TABLE account (
	id      TEXT PRIMARY KEY,
	balance BIGINT NOT NULL,
	fence   BIGINT NOT NULL DEFAULT 0
)`

// ErrNoAccount says that there is no row to write.
var ErrNoAccount = errors.New("sqlfence: no such account")

// Write sets the balance of an account, unless a holder with a newer fence has written it before: then the error
// matches lock.ErrStale. A holder may write as often as it likes.
//
// One statement compares and writes. A SELECT before it would leave a gap, in which another could write. For other
// databases: PostgreSQL has $1, $2 instead of question marks; MySQL needs clientFoundRows=true in the DSN, as it
// otherwise does not count a row that already has the values.
func Write(ctx context.Context, db *sql.DB, id string, balance int64, fence lock.Fence) error {
	if fence <= 0 {
		return fmt.Errorf("sqlfence: write %q: %w", id, lock.ErrNoFence)
	}
	result, err := db.ExecContext(ctx,
		`UPDATE account SET balance = ?, fence = ? WHERE id = ? AND fence <= ?`, balance, int64(fence), id, int64(fence))
	if err != nil {
		return fmt.Errorf("sqlfence: write %q: %w", id, err)
	}
	rows, err := result.RowsAffected()
	if err != nil {
		return fmt.Errorf("sqlfence: write %q: %w", id, err)
	}
	if rows == 0 {
		return fmt.Errorf("sqlfence: write %q: %w", id, whyNot(ctx, db, id))
	}
	return nil
}

// whyNot tells why no row was written. Nothing depends on it but the error: the row has been spared already.
func whyNot(ctx context.Context, db *sql.DB, id string) error {
	var one int
	err := db.QueryRowContext(ctx, `SELECT 1 FROM account WHERE id = ?`, id).Scan(&one)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return ErrNoAccount
	case err != nil:
		return err
	default:
		return lock.ErrStale
	}
}
