package history

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// Window is a span of time.
type Window struct{ From, To time.Duration }

func (w Window) touches(from, to time.Duration) bool { return w.From < to && from < w.To }

// Conditions say what a history was recorded under.
type Conditions struct {
	Frozen map[int][]Window // when workers were stopped
	Calm   []Window         // when nothing was broken
	Late   time.Duration    // how late an alarm may be heard of, as goroutines have to be scheduled
	Drift  func(ttl time.Duration) time.Duration

	// Overlap is when a second holder could get in, as the server had lost the key, or its sense of time. Then how long there
	// were two is reported, and the registers alone have to be right.
	Overlap []Window
}

func (c *Conditions) overlap(at time.Duration) bool {
	return slices.ContainsFunc(c.Overlap, func(w Window) bool { return w.From <= at && at < w.To })
}

// due is when a worker can have done what it had to do at an instant: then, or when it was no longer stopped.
func (c *Conditions) due(worker int, at time.Duration) time.Duration {
	stops := slices.SortedFunc(slices.Values(c.Frozen[worker]), func(a, b Window) int { return cmp.Compare(a.From, b.From) })
	for _, w := range stops {
		if w.From <= at+c.Late && w.To > at {
			at = w.To
		}
	}
	return at
}

func (c *Conditions) frozen(worker int, from, to time.Duration) bool {
	return slices.ContainsFunc(c.Frozen[worker], func(w Window) bool { return w.touches(from, to) })
}

// grant is one turn, as far as the history tells of it.
type grant struct {
	Event // Acquired
	end   time.Duration
	last  time.Duration // deadline
	lost  time.Duration // when the holder heard of it; 0: it did not
	freed time.Duration // when it was released
	most  time.Duration // the latest deadline that was confirmed
	why   string        // what ended it
}

// Report is what a check has found.
type Report struct {
	Grants     int
	Changes    int // grants that followed one of another process
	Losses     int
	Stale      int // writes and claims that were refused
	Accepted   int // writes
	Unknown    int // writes
	Overdue    int // grants that were over when they came
	MaxLate    time.Duration
	MaxOverlap time.Duration
	Violations []string
}

func (r *Report) violated(format string, args ...any) {
	r.Violations = append(r.Violations, fmt.Sprintf(format, args...))
}

// String returns the report in a line.
func (r *Report) String() string {
	return fmt.Sprintf("%d grants, %d of them in another process than the one before, %d lost; %d writes accepted, %d refused as stale, %d unknown; %d grants were over when they came; alarms at most %v late; %d violations",
		r.Grants, r.Changes, r.Losses, r.Accepted, r.Stale, r.Unknown, r.Overdue, r.MaxLate.Round(time.Microsecond), len(r.Violations))
}

// Check checks a whole history: intervals of a name are disjoint, fences rise, no alarm comes late, no deadline is early,
// nothing is lost in calm, no valid holder is refused, and the registers are as if there had been one writer at a time.
func Check(events []Event, c Conditions) *Report {
	r := &Report{}
	c.Frozen = withStalls(c.Frozen, events)
	refused := refusals(events)
	for _, gs := range grants(events, &c, r) {
		checkIntervals(gs, &c, r)
		for _, g := range gs {
			checkAlarm(g, &c, r)
			checkDeadline(g, &c, r)
			checkRefusals(g, refused[fenced{g.Worker, g.Name, g.Fence}], &c, r)
		}
	}
	checkRegisters(events, r)
	return r
}

// withStalls adds the times when a process could not run: to it that is the same as being stopped.
func withStalls(frozen map[int][]Window, events []Event) map[int][]Window {
	all := map[int][]Window{}
	for worker, windows := range frozen {
		all[worker] = slices.Clone(windows)
	}
	for _, e := range events {
		if e.Kind == Stalled {
			all[e.Worker] = append(all[e.Worker], Window{e.Called, e.At})
		}
	}
	return all
}

// grants returns the grants of each name in the order in which they were returned.
func grants(events []Event, c *Conditions, r *Report) map[string][]*grant {
	type id struct{ worker, grant int }
	byID := map[id]*grant{}
	byName := map[string][]*grant{}
	for _, e := range events {
		if e.Kind == Acquired {
			g := &grant{Event: e, last: e.Deadline}
			byID[id{e.Worker, e.Grant}] = g
			byName[e.Name] = append(byName[e.Name], g)
		}
	}
	for _, e := range events {
		g := byID[id{e.Worker, e.Grant}]
		if g == nil {
			continue
		}
		switch e.Kind {
		case Release:
			g.freed = e.At
			g.last = max(g.last, e.Deadline)
			if g.end == 0 || e.At < g.end {
				g.end, g.why = e.At, "release"
			}
		case Lost:
			g.last, g.lost = max(g.last, e.Deadline), e.At
			if g.end == 0 || e.At < g.end {
				g.end, g.why = e.At, "loss"
			}
		}
	}
	renewals(events, c, byName)
	for name, gs := range byName {
		slices.SortFunc(gs, func(a, b *grant) int { return int(a.At - b.At) })
		for _, g := range gs {
			if g.end == 0 || g.last < g.end {
				g.end, g.why = g.last, "deadline"
			}
		}
		valid := gs[:0]
		for _, g := range gs {
			if g.At < g.end {
				valid = append(valid, g)
				continue
			}
			r.Overdue++
			if g.Sent != 0 && !c.frozen(g.Worker, g.Sent-time.Second, g.At) {
				r.violated("%s: worker %d was given it %v too late", g.Name, g.Worker, g.At-g.end)
			}
		}
		byName[name] = valid
	}
	return byName
}

// renewals gives each renewal to the grant that its process had of the name when it was confirmed.
func renewals(events []Event, c *Conditions, byName map[string][]*grant) {
	type id struct {
		worker int
		name   string
	}
	renewed := map[id][]Event{}
	for _, e := range events {
		if e.Kind == Renewed {
			renewed[id{e.Worker, e.Name}] = append(renewed[id{e.Worker, e.Name}], e)
		}
	}
	for name, gs := range byName {
		for _, g := range gs {
			g.most = g.Sent + g.TTL - c.Drift(g.TTL)
			for _, e := range renewed[id{g.Worker, name}] {
				if g.freed == 0 || e.Sent < g.freed {
					g.most = max(g.most, e.Deadline)
				}
				if e.At >= g.At && (g.end == 0 || e.At < g.end) {
					g.last = max(g.last, e.Deadline)
				}
			}
		}
	}
}

func checkIntervals(gs []*grant, c *Conditions, r *Report) {
	var before *grant // that lasts longest
	var fence int64
	for i, g := range gs {
		r.Grants++
		if i > 0 && gs[i-1].Worker != g.Worker {
			r.Changes++
		}
		if before != nil && g.At < before.end {
			r.MaxOverlap = max(r.MaxOverlap, min(before.end, g.end)-g.At)
		}
		if before != nil && g.At < before.end && !c.overlap(g.At) {
			r.violated("%s: two holders for %v: grant %d of worker %d until its %s, and grant %d of worker %d", g.Name,
				min(before.end, g.end)-g.At, before.Grant, before.Worker, before.why, g.Grant, g.Worker)
		}
		if before == nil || g.end > before.end {
			before = g
		}
		if g.Fence != 0 {
			if g.Fence <= fence && !c.overlap(g.At) {
				r.violated("%s: fence %d (worker %d) after %d", g.Name, g.Fence, g.Worker, fence)
			}
			fence = max(fence, g.Fence)
		}
	}
}

func checkAlarm(g *grant, c *Conditions, r *Report) {
	due := c.due(g.Worker, g.last)
	if g.lost == 0 {
		if g.freed > due+c.Late {
			r.violated("%s: worker %d has never heard of its loss", g.Name, g.Worker)
		}
		return
	}
	r.Losses++
	if late := g.lost - due; late > 0 {
		r.MaxLate = max(r.MaxLate, late)
		if late > c.Late {
			r.violated("%s: worker %d heard of its loss %v after the deadline", g.Name, g.Worker, late)
		}
	}
	for _, w := range c.Calm {
		if w.From+2*g.TTL < g.lost && g.lost < w.To && !c.frozen(g.Worker, g.lost-g.TTL, g.lost) {
			r.violated("%s: worker %d lost it although nothing was broken", g.Name, g.Worker)
		}
	}
}

func checkDeadline(g *grant, c *Conditions, r *Report) {
	if g.Sent != 0 && g.last > g.most {
		r.violated("%s: worker %d trusts its lease %v too long", g.Name, g.Worker, g.last-g.most)
	}
	if g.Sent == 0 || c.frozen(g.Worker, g.Sent-time.Second, g.At) {
		return
	}
	if least := g.Sent + g.TTL - c.Drift(g.TTL) - c.Late; g.Deadline < least {
		r.violated("%s: worker %d has a deadline %v too early", g.Name, g.Worker, least-g.Deadline)
	}
}

// fenced is a grant as a register sees it.
type fenced struct {
	worker int
	name   string
	fence  int64
}

// refusals returns what registers have refused as stale.
func refusals(events []Event) map[fenced][]Event {
	all := map[fenced][]Event{}
	for _, e := range events {
		if e.Outcome == Stale && (e.Kind == Read || e.Kind == Write) {
			id := fenced{e.Worker, e.Name, e.Fence}
			all[id] = append(all[id], e)
		}
	}
	return all
}

// checkRefusals looks for operations that were refused although their holder was valid from begin to end: so somebody had a
// higher fence too early.
func checkRefusals(g *grant, refused []Event, c *Conditions, r *Report) {
	for _, e := range refused {
		if g.At <= e.Called && e.At < g.end && !c.overlap(e.Called) && !c.overlap(e.At) {
			r.violated("%s: fence %d of worker %d was refused while it was valid", g.Name, g.Fence, g.Worker)
		}
	}
}
