package clock

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestTheBoundsEncloseTheTruth(t *testing.T) {
	for range 1000 {
		low, high := AtLeast(), AtMost()
		require.LessOrEqual(t, low, high)
		require.GreaterOrEqual(t, high, time.Duration(0))
	}
}
