//go:build !linux

package clock

import "time"

// AtLeast returns 0: this system does not tell, or its monotonic clock counts suspensions itself.
func AtLeast() time.Duration { return 0 }

// AtMost returns 0, see AtLeast.
func AtMost() time.Duration { return 0 }
