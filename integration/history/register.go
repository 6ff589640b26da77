package history

import (
	"cmp"
	"fmt"
	"math"
	"slices"
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

// model says what a register may answer that is in a state at first. An operation of unknown outcome may have been done at
// any time while it was under way.
func model(first register) porcupine.Model {
	return porcupine.Model{
		Init: func() any { return first },
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
}

// window is a part of what happened to a register, and the state that it began in.
type window struct {
	first register
	ops   []porcupine.Operation
}

// longest is how many operations are looked at together, if they can be told apart.
const longest = 2000

// windows cuts the history of a register, as the time and memory that a check needs grow with the square of its length. It
// is cut after claims that were accepted while nothing else was under way: they tell the state. So all is in order if each
// part is.
func windows(ops []porcupine.Operation) []window {
	settle(ops)
	var all []window
	w, begin := window{}, 0
	busy := int64(math.MinInt64) // until when an earlier operation was under way
	for i, o := range ops {
		in, out := o.Input.(operation), o.Output.(answer)
		alone := busy < o.Call && (i+1 == len(ops) || o.Return < ops[i+1].Call)
		busy = max(busy, o.Return)
		if alone && !in.write && out.outcome == Accepted && i-begin >= longest {
			w.ops = ops[begin : i+1]
			all = append(all, w)
			w, begin = window{first: register{in.fence, out.value}}, i+1
		}
	}
	w.ops = ops[begin:]
	return append(all, w)
}

// settle sorts operations by their calls, and ends those of unknown outcome with the first that has been accepted with a
// higher fence: whatever is done later is refused, which is the same as if it is done just before that end.
func settle(ops []porcupine.Operation) {
	slices.SortFunc(ops, func(a, b porcupine.Operation) int { return cmp.Compare(a.Call, b.Call) })
	for i := range ops {
		o := &ops[i]
		if o.Return != math.MaxInt64 {
			continue
		}
		for _, later := range ops[i+1:] {
			if later.Output.(answer).outcome == Accepted && later.Input.(operation).fence > o.Input.(operation).fence {
				o.Return = later.Return
				break
			}
		}
	}
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
		for _, w := range windows(ops) {
			switch porcupine.CheckOperationsTimeout(model(w.first), w.ops, time.Minute) {
			case porcupine.Illegal:
				r.violated("%s: no order of %d operations makes sense", name, len(w.ops))
			case porcupine.Unknown:
				r.violated("%s: a minute was too short to look for an order of %d operations: nothing is proven", name, len(w.ops))
			}
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
