// Package clock tells how long the machine has been suspended. Go's monotonic clock stands still meanwhile on Linux
// (CLOCK_MONOTONIC), the expiry of a key in Redis does not.
package clock
