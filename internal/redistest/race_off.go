//go:build !race

package redistest

// Race tells whether the race detector is on, which changes what is allocated.
const Race = false
