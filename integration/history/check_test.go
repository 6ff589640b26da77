package history

import (
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"
)

func drift(ttl time.Duration) time.Duration { return ttl/100 + 2*time.Millisecond }

const ms = time.Millisecond

// held is a grant that is released.
func held(worker, grant int, from, to time.Duration, fence int64) []Event {
	return []Event{
		{Kind: Acquired, Worker: worker, Grant: grant, Name: "n", At: from, Sent: from, Deadline: from + 987*ms, TTL: time.Second, Fence: fence},
		{Kind: Release, Worker: worker, Grant: grant, Name: "n", At: to, Deadline: from + 987*ms},
	}
}

func check(parts ...[]Event) *Report {
	var all []Event
	for _, p := range parts {
		all = append(all, p...)
	}
	return Check(all, Conditions{Late: 20 * ms, Drift: drift})
}

func TestAHistoryThatKeepsThePromiseHasNoViolation(t *testing.T) {
	r := check(held(1, 1, 0, 100*ms, 1), held(2, 1, 100*ms, 200*ms, 2), held(1, 2, 300*ms, 400*ms, 5))
	require.Empty(t, r.Violations)
	require.Equal(t, 3, r.Grants)
	require.Equal(t, 2, r.Changes)
}

func TestViolationsAreFound(t *testing.T) {
	lost := func(at time.Duration) []Event {
		return []Event{
			{Kind: Acquired, Worker: 1, Grant: 1, Name: "n", Deadline: 987 * ms, TTL: time.Second, Fence: 1},
			{Kind: Lost, Worker: 1, Grant: 1, Name: "n", At: at, Deadline: 987 * ms},
		}
	}
	op := func(kind Kind, id int, at time.Duration, fence, value int64, outcome string) []Event {
		return []Event{{Kind: kind, Worker: 1, Op: id, Name: "n", Called: at, At: at + ms, Fence: fence, Value: value, Outcome: outcome}}
	}
	for name, c := range map[string]struct {
		history [][]Event
		says    string
	}{
		"overlap":                   {[][]Event{held(1, 1, 0, 100*ms, 1), held(2, 1, 99*ms, 200*ms, 2)}, "two holders"},
		"overlap with a dead one":   {[][]Event{held(1, 1, 0, 100*ms, 1)[:1], held(2, 1, 900*ms, 950*ms, 2)}, "two holders"},
		"overlap with one renewed":  {[][]Event{held(1, 1, 0, 2000*ms, 1)[:1], {{Kind: Renewed, Worker: 1, Name: "n", At: 500 * ms, Deadline: 1487 * ms}}, held(2, 1, 1400*ms, 1500*ms, 2)}, "two holders"},
		"a fence twice":             {[][]Event{held(1, 1, 0, 100*ms, 2), held(2, 1, 100*ms, 200*ms, 2)}, "fence 2"},
		"a late alarm":              {[][]Event{lost(1100 * ms)}, "heard of its loss"},
		"no alarm at all":           {[][]Event{held(1, 1, 0, 5*time.Second, 1)}, "never heard"},
		"a deadline too late":       {[][]Event{held(1, 1, ms, 100*ms, 1), {{Kind: Release, Worker: 1, Grant: 1, Name: "n", At: 100 * ms, Deadline: 2 * time.Second}}}, "too long"},
		"a grant too late":          {[][]Event{{{Kind: Acquired, Worker: 1, Grant: 1, Name: "n", At: 3 * time.Second, Sent: ms, Deadline: 988 * ms, TTL: time.Second}}}, "too late"},
		"an early deadline":         {[][]Event{{{Kind: Acquired, Worker: 1, Grant: 1, Name: "n", At: time.Second, Sent: time.Second, Deadline: 1500 * ms, TTL: time.Second}}}, "too early"},
		"a stale write accepted":    {[][]Event{op(Write, 1, 0, 2, 1, Accepted), op(Write, 2, 10*ms, 1, 2, Accepted)}, "makes sense"},
		"a fresh write refused":     {[][]Event{op(Write, 1, 0, 2, 1, Accepted), op(Write, 2, 10*ms, 3, 2, Stale)}, "makes sense"},
		"an accepted write is gone": {[][]Event{op(Write, 1, 0, 1, 1, Accepted), op(Read, 2, 10*ms, 2, 0, Accepted)}, "makes sense"},
		"a valid holder refused":    {[][]Event{held(1, 1, 0, 100*ms, 1), op(Write, 1, 10*ms, 1, 1, Stale), op(Write, 2, 5*ms, 2, 1, Accepted)}, "while it was valid"},
		"an increment too few":      {[][]Event{op(Write, 1, 0, 1, 1, Accepted), op(Write, 2, 10*ms, 2, 1, Accepted)}, "the counter"},
	} {
		t.Run(name, func(t *testing.T) {
			r := check(c.history...)
			require.NotEmpty(t, r.Violations)
			require.Contains(t, r.Violations[0], c.says)
		})
	}
}

func TestWhatHappensToAWorkerThatIsStoppedCountsFromItsEnd(t *testing.T) {
	events := []Event{
		{Kind: Acquired, Worker: 1, Grant: 1, Name: "n", Deadline: 987 * ms, TTL: time.Second, Fence: 1},
		{Kind: Lost, Worker: 1, Grant: 1, Name: "n", At: 3 * time.Second, Deadline: 987 * ms},
	}
	stop := func(until time.Duration) Conditions {
		return Conditions{Late: 20 * ms, Drift: drift, Frozen: map[int][]Window{1: {{500 * ms, until}}}}
	}
	require.Empty(t, Check(events, stop(2990*ms)).Violations)
	require.NotEmpty(t, Check(events, stop(2*time.Second)).Violations, "it had a second for that")
	calm := stop(2990 * ms)
	calm.Calm = []Window{{-3 * time.Second, 4 * time.Second}}
	require.Empty(t, Check(events, calm).Violations, "stopped is not calm")
	calm.Frozen = nil
	require.NotEmpty(t, Check(events, calm).Violations)
}

func TestTwoHoldersAreAllowedOnlyWhereTheServerHasLostTheKey(t *testing.T) {
	events := append(held(1, 1, 0, 100*ms, 1), held(2, 1, 50*ms, 200*ms, 2)...)
	c := Conditions{Late: 20 * ms, Drift: drift, Overlap: []Window{{40 * ms, 60 * ms}}}
	r := Check(events, c)
	require.Empty(t, r.Violations)
	require.Equal(t, 50*ms, r.MaxOverlap)
	c.Overlap = []Window{{60 * ms, 70 * ms}}
	require.NotEmpty(t, Check(events, c).Violations)
}

func TestWhatProvesNothingIsNoViolation(t *testing.T) {
	for name, history := range map[string][]Event{
		"a grant that was over when it came": {
			{Kind: Acquired, Worker: 1, Grant: 1, Name: "n", At: 3 * time.Second, Deadline: 987 * ms, TTL: time.Second, Fence: 1},
			{Kind: Acquired, Worker: 2, Grant: 1, Name: "n", At: 2 * time.Second, Deadline: 2987 * ms, TTL: time.Second, Fence: 2},
		},
		"a write of unknown outcome that was done": {
			{Kind: Write, Worker: 1, Op: 1, Name: "n", Called: 0, At: 0, Fence: 1, Value: 1, Outcome: Begun},
			{Kind: Read, Worker: 2, Op: 1, Name: "n", Called: 10 * ms, At: 11 * ms, Fence: 2, Value: 1},
		},
		"and one that was not": {
			{Kind: Write, Worker: 1, Op: 1, Name: "n", Called: 0, At: 0, Fence: 1, Value: 1, Outcome: Unknown},
			{Kind: Read, Worker: 2, Op: 1, Name: "n", Called: 10 * ms, At: 11 * ms, Fence: 2, Value: 0},
		},
	} {
		t.Run(name, func(t *testing.T) { require.Empty(t, check(history).Violations) })
	}
}

func TestALongHistoryIsCheckedInParts(t *testing.T) {
	const n = 3 * longest
	history := func(wrong int) (events []Event) {
		add := func(kind Kind, worker int, at time.Duration, fence, value int64, outcome string) {
			events = append(events, Event{Kind: kind, Worker: worker, Op: len(events), Name: "n", Called: at, At: at + ms, Fence: fence, Value: value, Outcome: outcome})
		}
		value := int64(0)
		for i := range n {
			fence, at := int64(i+1), time.Duration(i)*10*ms
			read := value
			if i == wrong {
				read--
			}
			add(Read, 1, at, fence, read, Accepted)
			if i%10 == 0 { // a worker is killed in the middle, half of the times after the effect
				add(Write, 2, at+2*ms, fence, value+1, Begun)
				value += int64(i / 10 % 2)
				continue
			}
			value++
			add(Write, 1, at+2*ms, fence, value, Accepted)
		}
		return events
	}
	require.Empty(t, check(history(-1)).Violations)
	for _, wrong := range []int{longest / 2, longest + 1, n - 1} {
		require.NotEmpty(t, check(history(wrong)).Violations, wrong)
	}
	var ops []porcupine.Operation
	for i := range n {
		ops = append(ops, porcupine.Operation{Call: int64(2 * i), Return: int64(2*i + 1), Input: operation{fence: int64(i)}, Output: answer{value: 7}})
	}
	parts := windows(ops)
	require.Len(t, parts, 3)
	require.Equal(t, register{longest, 7}, parts[1].first)
}
