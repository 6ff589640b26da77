package history

import (
	"fmt"
	"math"
	"time"

	"github.com/anishathalye/porcupine"
)

// What became of a write or a claim.
const (
	Accepted = ""        // it was done
	Stale    = "stale"   // a newer fence had been there
	Unknown  = "unknown" // no answer came
	Begun    = "begun"   // it is about to be sent; if nothing follows the process was killed
)

// operation is what a holder did to a register: claim it with a fence, which tells the value, or write a value.
type operation struct {
	write bool
	fence int64
	value int64 // to be written
}

// register is a fenced register: it refuses fences lower than the highest it has seen, also of those who only read.
type register struct {
	fence, value int64
}

// answer is what the operation returned.
type answer struct {
	outcome string
	value   int64 // of a claim
}

// model says what a register may answer. An operation of unknown outcome may have been done at any time, also after all
// others, which is the same as never.
var model = porcupine.Model{
	Init: func() any { return register{} },
	Step: func(state, input, output any) (bool, any) {
		r, op, a := state.(register), input.(operation), output.(answer)
		fresh := op.fence >= r.fence
		next := r
		if fresh {
			next.fence = op.fence
			if op.write {
				next.value = op.value
			}
		}
		switch a.outcome {
		case Unknown:
			return true, next
		case Stale:
			return !fresh, r
		default:
			return fresh && (op.write || a.value == r.value), next
		}
	},
	DescribeOperation: func(input, output any) string { return fmt.Sprintf("%+v -> %+v", input, output) },
}

// checkRegisters looks for an order of all operations on each register in which they make sense, and whether a counter
// that is raised by reading and writing under the lock has become what was written.
func checkRegisters(events []Event, r *Report) {
	type id struct{ worker, op int }
	ops := map[string][]porcupine.Operation{}
	counts := map[string]*tally{}
	settled := map[id]bool{}
	for _, e := range events {
		if (e.Kind == Write || e.Kind == Read) && e.Outcome != Begun {
			settled[id{e.Worker, e.Op}] = true
		}
	}
	for _, e := range events {
		if e.Kind != Write && e.Kind != Read || e.Outcome == Begun && settled[id{e.Worker, e.Op}] {
			continue
		}
		if counts[e.Name] == nil {
			counts[e.Name] = &tally{}
		}
		o := porcupine.Operation{
			ClientId: e.Worker, Call: int64(e.Called), Return: int64(e.At),
			Input:  operation{write: e.Kind == Write, fence: e.Fence, value: e.Value},
			Output: answer{outcome: e.Outcome, value: e.Value},
		}
		if e.Outcome == Unknown || e.Outcome == Begun {
			o.Output, o.Return = answer{outcome: Unknown}, math.MaxInt64
		}
		ops[e.Name] = append(ops[e.Name], o)
		counts[e.Name].add(e, r)
	}
	for name, ops := range ops {
		switch porcupine.CheckOperationsTimeout(model, ops, time.Minute) {
		case porcupine.Illegal:
			r.violated("%s: no order of its %d operations makes sense", name, len(ops))
		case porcupine.Unknown:
			r.violated("%s: a minute was too short to look for an order of its %d operations: nothing is proven", name, len(ops))
		}
		if c := counts[name]; c.highest < c.accepted || c.highest > c.accepted+c.unknown {
			r.violated("%s: the counter is at %d after %d increments and %d of unknown outcome", name, c.highest, c.accepted, c.unknown)
		}
	}
}

// tally counts what was done to a counter.
type tally struct{ accepted, unknown, highest int64 }

func (t *tally) add(e Event, r *Report) {
	switch {
	case e.Outcome == Stale:
		r.Stale++
	case e.Kind == Read && e.Outcome == Accepted:
		t.highest = max(t.highest, e.Value)
	case e.Kind == Read:
	case e.Outcome == Accepted:
		r.Accepted++
		t.accepted++
		t.highest = max(t.highest, e.Value)
	default:
		r.Unknown++
		t.unknown++
	}
}
