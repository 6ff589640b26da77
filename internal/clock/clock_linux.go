package clock

import (
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

const (
	monotonic = 1 // CLOCK_MONOTONIC
	boottime  = 7 // CLOCK_BOOTTIME: the same, and the time of suspensions
)

// fresh is how long a lower bound is used again, as system calls cost more than all else that is done for a lock.
const fresh = 10 * time.Millisecond

var (
	began = time.Now()
	bound atomic.Int64 // the last lower bound that was found
	until atomic.Int64 // and how long it is used, from began
)

// AtLeast returns a lower bound of the time for which the machine has been suspended since it was started. A bound that was
// found up to 10 ms ago is one still.
func AtLeast() time.Duration {
	at := time.Since(began)
	if left := until.Load() - int64(at); 0 < left && left <= int64(fresh) { // else it is another clock's, such as a bubble's
		return time.Duration(bound.Load())
	}
	b := read(boottime)
	low := b - read(monotonic) // in this order: time that passes between the two is not mistaken for suspension
	bound.Store(int64(low))
	until.Store(int64(at + fresh))
	return low
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
