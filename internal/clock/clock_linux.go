package clock

import (
	"syscall"
	"time"
	"unsafe"
)

const (
	monotonic = 1 // CLOCK_MONOTONIC
	boottime  = 7 // CLOCK_BOOTTIME: the same, and the time of suspensions
)

// AtLeast returns a lower bound of the time for which the machine has been suspended since it was started. The order
// of the two readings makes it one: time that passes between them is not mistaken for suspension.
func AtLeast() time.Duration {
	b := read(boottime)
	return b - read(monotonic)
}

// AtMost returns an upper bound of the same.
func AtMost() time.Duration {
	m := read(monotonic)
	return read(boottime) - m
}

func read(id uintptr) time.Duration {
	var ts syscall.Timespec
	_, _, errno := syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, id, uintptr(unsafe.Pointer(&ts)), 0)
	if errno != 0 {
		return 0
	}
	return time.Duration(ts.Nano())
}
