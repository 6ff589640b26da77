package redistest_test

import (
	"os"
	"testing"

	"github.com/seed-b640e7e9/lock/internal/redistest"
)

func TestMain(m *testing.M) {
	os.Exit(redistest.Main(m))
}
