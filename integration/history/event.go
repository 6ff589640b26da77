// Package history records what holders of locks see, and checks that the promise was kept.
//
// Workers are processes. Each writes its events to a pipe as they happen, before anything can kill it. All instants are
// nanoseconds of CLOCK_MONOTONIC, which the processes of a machine share.
package history

import (
	"encoding/json"
	"io"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

// Kind says what has happened.
type Kind string

const (
	Acquired Kind = "acquired" // Acquire has returned a Lock
	Renewed  Kind = "renewed"  // a command was confirmed that prolongs the lease
	Release  Kind = "release"  // Release is about to be called
	Lost     Kind = "lost"     // the Lock's context has ended with ErrLost
	Released Kind = "released" // Release has returned
	Write    Kind = "write"    // a fenced write begins, or has returned
	Read     Kind = "read"     // a claim, which reads: the same
	Failed   Kind = "failed"   // Acquire has failed
	Stalled  Kind = "stalled"  // the machine has not let the process run, from Called on
)

// Event is one line of a history.
type Event struct {
	Kind     Kind
	Worker   int           // which process
	Grant    int           // which grant of the process; 0 for what belongs to none
	Op       int           `json:",omitempty"` // of Write, Read: which of the process
	Name     string        // of the lock
	At       time.Duration // when it happened; for calls: when it returned
	Called   time.Duration `json:",omitempty"` // when it was called
	Sent     time.Duration `json:",omitempty"` // of Acquired, Renewed: when the command was about to be sent
	Deadline time.Duration `json:",omitempty"` // of Acquired, Renewed, Release, Lost: the Lock's
	TTL      time.Duration `json:",omitempty"`
	Fence    int64         `json:",omitempty"`
	Value    int64         `json:",omitempty"` // written or read
	Outcome  string        `json:",omitempty"` // of Write, Read, Released, Failed: "" for success
}

// Now reads the clock that all processes share.
func Now() time.Duration {
	var ts syscall.Timespec
	const monotonic = 1
	syscall.Syscall(syscall.SYS_CLOCK_GETTIME, monotonic, uintptr(unsafe.Pointer(&ts)), 0)
	return time.Duration(ts.Nano())
}

// On converts an instant of Go's clock. Two readings bracket it, at most a millisecond apart: the result is early by less
// than that, and never late.
func On(t time.Time) time.Duration {
	for {
		before := Now()
		left := time.Until(t)
		if Now()-before < time.Millisecond {
			return before + left
		}
	}
}

// Recorder writes events. It is safe for concurrent use.
type Recorder struct {
	Worker int

	mu  sync.Mutex // guards w
	enc *json.Encoder
}

// NewRecorder returns a Recorder that writes to w, without a buffer.
func NewRecorder(worker int, w io.Writer) *Recorder {
	return &Recorder{Worker: worker, enc: json.NewEncoder(w)}
}

// Add writes an event.
func (r *Recorder) Add(e Event) {
	e.Worker = r.Worker
	r.mu.Lock()
	defer r.mu.Unlock()
	_ = r.enc.Encode(e) // a pipe that nobody reads any more
}

// Collect reads the events of a worker until the pipe is closed. A line that was cut off by a kill is left out.
func Collect(r io.Reader, add func(Event)) {
	dec := json.NewDecoder(r)
	for {
		var e Event
		if dec.Decode(&e) != nil {
			return
		}
		add(e)
	}
}
