// Package mutants is a table of broken variants of the library. Each leaves out one rule that the promise depends on, by
// the smallest edit that a hurried change could make; a test of the library is named for each that fails on it.
package mutants

// Mutant is a broken variant, and the test that catches it.
type Mutant struct {
	Name string // what is wrong with it

	// The edit. Old occurs exactly once in the File, whose path begins at the root of the library's module.
	File, Old, New string
	Edits          []Edit // the edits, where it takes several: instead of the above

	Package string // of the test
	Run     string // the test, or one of its subtests with the names joined by slashes
}

// Edit is the replacement of a part of a file that occurs there once.
type Edit struct{ File, Old, New string }

// All returns the edits of m.
func (m *Mutant) All() []Edit {
	if len(m.Edits) > 0 {
		return m.Edits
	}
	return []Edit{{m.File, m.Old, m.New}}
}

const (
	root    = "."
	redlock = "./redlock"
	calls   = "./internal/call"
)

// All is every mutant.
var All = []Mutant{
	// Deleting.
	{
		Name: "bare DEL",
		File: "scripts.go",
		Old:  "if value == ARGV[1] then\n  redis.call('DEL', KEYS[1])",
		New:  "if redis.call('DEL', KEYS[1]) == 1 then",

		Package: root, Run: "TestALateDeleteOfOneLeaseLeavesTheNextAlone",
	},

	// The deadline and the alarm.
	{
		Name: "deadline from the reply of the acquire",
		File: "lock_acquire.go",
		Old:  "g := granted{sent: sent, fence: reply.Fence}",
		New:  "g := granted{sent: now(), fence: reply.Fence}",

		Package: root, Run: "TestTheDeadlineCountsFromTheSendAndNotFromTheReply",
	},
	{
		Name: "deadline from the reply of a renewal",
		File: "watchdog.go",
		Old:  "live[i].renewed(sent, rs[i].TTL, err)",
		New:  "live[i].renewed(now(), rs[i].TTL, err)",

		Package: root, Run: "TestTheDeadlineCountsFromTheSendOfARenewal",
	},
	{
		Name: "deadline from the reply of Extend",
		File: "lock.go",
		Old:  "return l.confirm(sent, ttl)",
		New:  "sent = now()\n\t\t\treturn l.confirm(sent, ttl)",

		Package: root, Run: "TestTheDeadlineCountsFromTheSendAndNotFromTheReply",
	},
	{
		Name: "deadline from a retry that found its own token, without a raised TTL",
		File: "scripts.go",
		Old:  "if value then\n  if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then\n    redis.call('PEXPIRE', KEYS[1], ARGV[2])\n  end\nend\n",
		New:  "",

		Package: root, Run: "TestAGrantThatALateRetryFoundIsNotTrustedBeyondTheKeysExpiry",
	},
	{
		Name: "no drift allowance",
		File: "watchdog_lease.go",
		Old:  "return ttl/100 + 2*time.Millisecond",
		New:  "return 0 * ttl",

		Package: root, Run: "TestTheDeadlineCountsFromTheSendAndNotFromTheReply",
	},
	{
		Name: "alarm that waits for the renewal call",
		Edits: []Edit{
			{
				"watchdog_lease.go",
				"l.planLocked(at.Add(l.kind.ttl / 6))\n",
				"l.planLocked(at.Add(l.kind.ttl / 6))\n\tl.dog.alarms.Remove(&l.alarm) // the answer sets it again\n",
			},
			{
				"watchdog_lease.go",
				"\tl.failure = err\n",
				"\tl.failure = err\n\tl.dog.alarms.Put(&l.alarm, l.deadline)\n",
			},
		},

		Package: root, Run: "TestC18TheHolderHearsBeforeAnyoneElseCanGetIn",
	},
	{
		Name: "alarm that only the next renewal raises",
		Edits: []Edit{
			{"watchdog_lease.go", "\t\tl.dog.alarms.Put(&l.alarm, l.deadline)\n", ""},
			{"watchdog_lease.go", "\t\tl.dog.alarms.Put(&l.alarm, d)\n", ""},
		},

		Package: root, Run: "TestC18TheHolderHearsBeforeAnyoneElseCanGetIn",
	},
	{
		Name: "Valid that waits for the alarm",
		File: "watchdog_lease.go",
		Old:  "\tg.lease.checkLocked(suspended)\n\treturn g.ended\n",
		New:  "\t_ = suspended\n\treturn g.ended\n",

		Package: root, Run: "TestASuspendedMachineHasLostItsLeases",
	},

	{
		Name: "release without an answer, after a suspension, told as unknown",
		File: "lock_release.go",
		Old:  "\tcase overslept:\n",
		New:  "\tcase overslept && g == nil:\n",

		Package: root, Run: "TestASuspendedMachineHasLostItsLeases",
	},

	// Sending together.
	{
		Name: "command in a pipeline, told as certainly not sent",
		File: "internal/call/batch.go",
		Old:  "\tif r.place == nil {\n\t\treturn false\n\t}\n",
		New:  "\tif r.place == nil {\n\t\treturn true\n\t}\n",

		Package: calls, Run: "TestWhatWasSentInABatchIsUnknownAndWhatWasNotIsNot",
	},
	{
		Name: "pipeline that is sent although all have left",
		File: "internal/call/batch.go",
		Old:  "\tf.cancel()\n\tb.doneLocked(f)\n",
		New:  "\tb.doneLocked(f)\n",

		Package: calls, Run: "TestNothingIsSentForThoseWhoLeftWhileAConnectionWasDialed",
	},
	{
		Name: "pipeline without an answer that holds up all others",
		File: "internal/call/batch.go",
		Old:  "time.AfterFunc(patience, func",
		New:  "time.AfterFunc(time.Hour, func",

		Package: calls, Run: "TestABatchThatIsNotAnsweredDoesNotHoldUpOthers",
	},

	// Renewing.
	{
		Name: "renewal that ignores 0",
		File: "watchdog_lease.go",
		Old:  "\t\tl.lose(errGone)\n",
		New:  "\t\tl.failed(sent, err)\n",

		Package: root, Run: "TestTheServersWordIsALossAtOnce",
	},
	{
		Name: "renewal and Extend that shorten",
		File: "scripts.go",
		Old: "  if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then\n    redis.call('PEXPIRE', KEYS[1], ARGV[2])\n  end\n" +
			"  return 1\n",
		New: "  redis.call('PEXPIRE', KEYS[1], ARGV[2])\n  return 1\n",

		Package: root, Run: "TestALateCopyOfACommandShortensNothing",
	},
	{
		Name: "prolongation that shortens",
		File: "scripts.go",
		Old: "  if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then\n    redis.call('PEXPIRE', KEYS[1], ARGV[2])\n  end\n" +
			"  local listeners",
		New: "  redis.call('PEXPIRE', KEYS[1], ARGV[2])\n  local listeners",

		Package: root, Run: "TestALateCopyOfAProlongationShortensNothing",
	},
	{
		Name: "acquire that shortens",
		File: "scripts.go",
		Old:  "if value then\n  if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then",
		New:  "if value then\n  if true then",

		Package: root, Run: "TestALateCopyOfAnAcquireShortensNothing",
	},
	{
		Name: "deadline that moves back",
		File: "watchdog_lease.go",
		Old:  "d.After(l.deadline) {",
		New:  "!d.Equal(l.deadline) {",

		Package: root, Run: "TestExtendNeverShortens",
	},

	// Fences.
	{
		Name: "counter outside the script, after the grant",
		Edits: []Edit{
			{
				"scripts_single.go",
				"\tif r.Fence == FenceOff {\n\t\targs = append(args, r.Key.Lock",
				"\tif r.Count >= 0 {\n\t\targs = append(args, r.Key.Lock",
			},
			{
				"scripts_single.go",
				"	if err == nil && r.Fence != FenceOff && (got.Fence <= 0 || !got.Own && got.Fence <= Fence(r.Count)) {\n\t\treturn Reply{}, unexpected(reply)\n\t}\n\treturn got, err\n}",
				`	if err == nil && r.Fence != FenceOff {
		raised := redis.NewIntCmd(ctx, "incrby", r.Key.Fence, r.Count+1)
		if err := outcome(s.client.Process(ctx, &call.Message{Cmder: raised}, r.Limit)); err != nil {
			return Reply{}, err
		}
		got.Fence = Fence(raised.Val())
	}
	return got, err
}`,
			},
		},

		Package: root, Run: "TestACounterThatCantRiseMeansNoLock/miniredis",
	},
	{
		Name: "counter outside the script, before the grant",
		Edits: []Edit{
			{
				"scripts_single.go",
				"\tif r.Fence == FenceOff {\n\t\targs = append(args, r.Key.Lock",
				`	raised := redis.NewIntCmd(ctx, "incrby", r.Key.Fence, r.Count+1)
	if r.Fence != FenceOff {
		if err := outcome(s.client.Process(ctx, &call.Message{Cmder: raised}, r.Limit)); err != nil {
			return Reply{}, err
		}
	}
	if r.Count >= 0 {
		args = append(args, r.Key.Lock`,
			},
			{
				"scripts_single.go",
				"\tgot, err := readAcquired(reply)\n",
				"\tgot, err := readAcquired(reply)\n\tgot.Fence = Fence(raised.Val())\n",
			},
		},

		Package: root, Run: "TestAFenceIsCountedTogetherWithTheGrant",
	},
	{
		Name: "SET before the counter",
		Edits: []Edit{
			{
				"scripts.go",
				"local fence = '0'\nif KEYS[2] then\n",
				"if not value then\n  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])\nend\nlocal fence = '0'\nif KEYS[2] then\n",
			},
			{"scripts.go", "redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])\nreturn fence\n", "return fence\n"},
		},

		Package: root, Run: "TestACounterThatCantRiseMeansNoLock/miniredis",
	},

	// Tokens.
	{
		Name: "one token for two leases",
		File: "lock_acquire.go",
		Old:  "\t\ta.req.Token = newToken()\n",
		New:  "\t\ta.req.Token = l.core.id\n",

		Package: root, Run: "TestALateDeleteOfOneLeaseLeavesTheNextAlone",
	},
	{
		Name: "grant on a token that a delete was sent for",
		File: "lock_acquire.go",
		Old:  "if !c.room.Pass(key, t) && t.rest != nil {\n\t\tt.rest.close(c)\n\t}",
		New:  "if t.rest != nil {\n\t\tt.rest.close(c)\n\t}\n\tc.room.Pass(key, t)",

		Package: root, Run: "TestAHeadThatIsCancelledLeavesItsAttemptToTheNext",
	},
	{
		Name: "grant on a token that a delete was sent for, as the next is of another kind",
		File: "lock_contend.go",
		Old:  "\t\ta.last = c.last\n",
		New:  "\t\ta.last, a.req.Token = c.last, c.req.Token\n",

		Package: root, Run: "TestAnAttemptOfAnotherKindIsNotGoneOnWith",
	},
	{
		Name: "grant that came after its context had ended, not given back",
		File: "lock_acquire.go",
		Old:  "\t\ta.strays.add(sent)\n\t\treturn granted{}, 0, call.ContextError(ctx)\n",
		New:  "\t\treturn granted{}, 0, call.ContextError(ctx)\n",

		Package: root, Run: "TestNoLockIsReturnedWithADeadContext",
	},
	{
		Name: "grant that came too late, not given back",
		File: "lock_acquire.go",
		Old:  "\t\ta.strays.add(sent)\n\t\ta.unknown = errLate\n",
		New:  "\t\ta.unknown = errLate\n",

		Package: redlock, Run: "TestHeldNoQuorumAndLateAreThreeErrors",
	},
	{
		Name: "grant that came too late, returned",
		File: "lock_acquire.go",
		Old:  "<= a.req.TTL/4 {",
		New:  "<= -a.req.TTL {",

		Package: root, Run: "TestNoGrantIsReturnedTooLate",
	},

	// Handoff.
	{
		Name: "handoff that leaves the old grant alive",
		File: "lock_handoff.go",
		Old:  "\tg.endLocked(ErrReleased)\n",
		New:  "",

		Package: root, Run: "TestAGrantThatWasPassedOnCanDoNothingMore",
	},
	{
		Name: "handoff that leaves the old context alive",
		File: "lock_handoff.go",
		Old:  "\tif g.cancel != nil {\n\t\tg.cancel(ErrReleased) // before the next can know\n\t}\n",
		New:  "",

		Package: root, Run: "TestWaitersAreServedInTheOrderInWhichTheyCame",
	},
	{
		Name: "handoff that keeps the old fence",
		File: "lock_handoff.go",
		Old:  "next.fence = r.next\n",
		New:  "next.fence = g.fence\n",

		Package: root, Run: "TestAGrantThatWasPassedOnCanDoNothingMore",
	},
	{
		Name: "handoff near the deadline",
		File: "lock_handoff.go",
		Old:  ", at.Add(l.kind.ttl / 3).After(l.deadline):",
		New:  ":",

		Package: root, Run: "TestALeaseWithLittleLeftIsNotPassedOn",
	},
	{
		Name: "handoff after the deadline",
		Edits: []Edit{
			{"lock_handoff.go", " || g.check() != nil {", " {"},
			{"watchdog_lease.go", "return g.ended == nil && time.Until(g.lease.deadline) > g.lease.kind.ttl/4", "return g.ended == nil"},
		},

		Package: root, Run: "TestALeaseThatIsOverIsNotPassedOn",
	},
	{
		Name: "no stand-back after a run",
		File: "lock_handoff.go",
		Old:  "\tt.after = time.Now().Add(pause)\n",
		New:  "",

		Package: root, Run: "TestAProcessStandsBackAndIsNotWokenByItsOwnRelease",
	},
	{
		Name: "newcomers that do not stand back",
		File: "lock_handoff.go",
		Old:  "if forget := c.room.Keep(l.key.Lock, t); forget != nil {\n\t\ttime.AfterFunc(pause, forget)\n\t}",
		New:  "c.room.Pass(l.key.Lock, t)",

		Package: root, Run: "TestAProcessStandsBackAndIsNotWokenByItsOwnRelease",
	},
	{
		Name: "waiters woken by their own room's releases",
		File: "lock_contend.go",
		Old:  "\t\tif from != l.core.id {\n\t\t\tc.wake()\n\t\t}\n",
		New:  "\t\tc.wake()\n",

		Package: root, Run: "TestAProcessStandsBackAndIsNotWokenByItsOwnRelease",
	},

	// Redlock.
	{
		Name: "Redlock without drift",
		File: "watchdog_lease.go",
		Old:  "return ttl/100 + 2*time.Millisecond",
		New:  "return 0 * ttl",

		Package: redlock, Run: "TestAHolderIsToldBeforeClocksThatGainAPercentLetAnotherIn",
	},
	{
		Name: "Redlock's prolongation that gives up what its holder has released",
		File: "redlock/renew.go",
		Old:  " && (r.Live == nil || r.Live())",
		New:  "",

		Package: redlock, Run: "TestAProlongationThatTheReleaseOvertakesGivesNothingUp",
	},
	{
		Name: "Redlock that counts nodes that got the token again",
		File: "redlock/renew.go",
		Old:  "n.Renew(limited, b.rs, func(k int, _ lock.Reply, err error) { b.answer(ctx, k, i, err) })",
		New: `n.Renew(limited, b.rs, func(k int, _ lock.Reply, err error) {
		if errors.Is(err, lock.ErrLost) {
			r := b.rs[k]
			r.Again, r.Fence, r.Limit = true, lock.FenceOff, patience(r.TTL)
			if _, e := n.Acquire(limited, r); e == nil {
				err = nil
			}
		}
		b.answer(ctx, k, i, err)
	})`,

		Package: redlock, Run: "TestNodesThatGetTheTokenAgainDoNotCountBefore",
	},
	{
		Name: "Redlock's unconditional fence write-back",
		File: "scripts.go",
		Old:  "local value = redis.call('GET', KEYS[1])\nif value == ARGV[1] then\n  local fence = '0'\n",
		New: `local value = redis.call('GET', KEYS[1])
if KEYS[2] and ARGV[3] == '0' then
  redis.call('SET', KEYS[2], ARGV[4])
  return {0, ARGV[4]}
end
if value == ARGV[1] then
  local fence = '0'
`,

		Package: redlock, Run: "TestASlowWriteBackOverMiniredisDoesNotMakeAFenceComeTwice",
	},
	{
		Name: "Redlock that gives the token back after a release has begun",
		Edits: []Edit{
			{"redlock/token.go", "if r.Live != nil && !r.Live() {", "if r.Live != nil && q == nil {"},
			{"redlock/token.go", "if t.ended != nil || t.taking[i] > 0 {", "if t.taking[i] > 0 {"},
		},

		Package: redlock, Run: "TestNothingIsReinstalledAfterARelease",
	},
	{
		Name: "Redlock that gives the token back after a release has ended",
		File: "redlock/token.go",
		Old:  "if r.Live != nil && !r.Live() {",
		New:  "if r.Live != nil && q == nil {",

		Package: redlock, Run: "TestRenewAfterReleaseInstalls",
	},
	{
		Name: "Redlock that gives the token back over another's",
		Edits: []Edit{
			{
				"redlock/token.go",
				"r.Again, r.Fence, r.Count, r.Limit = true, lock.FenceOff, 0, patience(r.TTL)",
				"r.Again, r.Fence, r.Count, r.Limit, r.Quiet = true, lock.FenceOff, 0, patience(r.TTL), true",
			},
			{"scripts_single.go", "if r.Again || r.Fence != FenceOff {", "if !r.Quiet && (r.Again || r.Fence != FenceOff) {"},
			{
				"scripts_single.go",
				`	m.cmd = *redis.NewStatusCmd(ctx, append(m.args[:0], "set", r.Key.Lock, &m.token, "px", &m.ttl, "nx")...)`,
				`	args := append(m.args[:0], "set", r.Key.Lock, &m.token, "px", &m.ttl, "nx")
	if r.Quiet {
		args = args[:5]
	}
	m.cmd = *redis.NewStatusCmd(ctx, args...)`,
			},
		},

		Package: redlock, Run: "TestANodeThatHasForgottenGetsItsTokenAgain",
	},
	{
		Name: "Redlock that gives nothing back after a failed vote",
		File: "redlock/acquire.go",
		Old:  "\tif maybe == 0 {\n",
		New:  "\tif maybe <= q.all {\n",

		Package: redlock, Run: "TestTwoSilentNodesOfThreeFailSoonAndLeaveNothing",
	},
	{
		Name: "Redlock that does not wait for a vote under way before it gives back",
		File: "redlock/token.go",
		Old:  "\t\t\t\twaits.add(i)\n",
		New:  "",

		Package: redlock, Run: "TestALateGrantIsGivenBack",
	},
	{
		Name: "Redlock that forgets that a vote without an answer may come yet",
		File: "redlock/token.go",
		Old:  "\tif unknown {\n\t\tended.doubt(i, until)\n\t}\n",
		New:  "",

		Package: redlock, Run: "TestALateGrantIsGivenBack",
	},
	{
		Name: "spent token used again by the next try",
		File: "lock_acquire.go",
		Old:  "a.req.Token, a.req.Used, a.strays = newToken(), false, strays{}",
		New:  "a.req.Used, a.strays = false, strays{}",

		Package: redlock, Run: "TestNoVoteHasATokenThatWasGivenBack",
	},
	{
		Name: "spent token used again by the next vote",
		File: "redlock/acquire.go",
		Old:  "= uuid.NewString(), true, false",
		New:  "= r.Token+uuid.Nil.String()[:0], true, false",

		Package: redlock, Run: "TestNoVoteHasATokenThatWasGivenBack",
	},
	{
		Name: "Redlock's release of unknown outcome, told as a loss",
		File: "redlock/release.go",
		Old:  `fmt.Errorf("%w: %w", lock.ErrUnknown, err)`,
		New:  `fmt.Errorf("not released: %w", err)`,

		Package: redlock, Run: "TestAReleaseThatIsFinishedInTheBackgroundIsNoLoss",
	},
}
