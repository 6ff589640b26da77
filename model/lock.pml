/*
 * The protocol of package lock on one Redis, for Spin. README.md says how to run it and what it leaves out.
 *
 * Two processes, A and B, want one name. All times are relative, in ticks: what is left of the key's TTL on the
 * server's clock, what is left until a deadline on a client's. So runs have no end, and the search is still finite.
 * Ticks fall between any two steps, which is what a pause is. Comments name the function of the Go code that a step
 * stands for. Each switch (-DNO_DRIFT, ...) takes one assumption or rule away.
 */
#ifndef TTL
#define TTL 3
#endif
#define SHORT 1       /* the TTL of a renewal near WithMaxHold, or of an Extend, that is less than the lease's */
#ifndef TOKENS_A
#define TOKENS_A 2    /* how many leases A may ask for, and B */
#endif
#ifndef TOKENS_B
#define TOKENS_B 1
#endif
#ifndef SENDS
#define SENDS 2       /* how often an acquire may be sent with one token */
#endif
#ifndef COPIES
#define COPIES 0      /* how often the network may make a second copy of an acquire */
#endif
#ifndef WRITES
#define WRITES 1      /* whether holders write to a resource */
#endif
#ifndef EXTENDS
#define EXTENDS 1     /* whether there are renewals with SHORT */
#endif
#ifdef NO_DRIFT
#define D 0
#else
#define D 1           /* drift(): what a client's clock may lose on the server's within a TTL */
#endif
#define A 0
#define B 1
#define TOKENS (TOKENS_A + TOKENS_B)

/* where a client is */
#define IDLE 0
#define TRY  1
#define HOLD 2
/* what it waits for an answer to */
#define NOTHING 0
#define ACQUIRE 1
#define RENEW   2
/* the answer, if there is one; "own": the key had the token already */
mtype = { none, granted, own, held }; /* of being held a client need not hear: it may try again at any time */

typedef Client {      /* a process with its Locker: attempt, lease, grant */
	byte at;
	byte token;       /* of the attempt or lease; one that is used up is never used again */
	byte sends;
	byte asked;
	byte age;         /* since sent, which is taken before the request can arrive */
	mtype answer;
	byte answerFence;
	byte left;        /* until the deadline, on its own clock: Valid() is left > 0 */
	byte steady;      /* ticks until its clock may lose one again */
	byte fence;       /* of the current grant */
	byte next;        /* the fence that is reserved for a handoff; 0: none */
	bool old;         /* a grant that was passed on goes on: only with HANDOFF_LEAVES_OLD */
	byte early        /* a fence taken before the lock: only with FENCE_BEFORE_SET */
};
Client c[2];

byte key, keyTTL;     /* the server: 0 or a token; what is left */
byte counter;         /* and the fence counter */

/* The set of messages: an acquire is there so many times, as each may raise the counter; of the others a copy stays for
 * ever, as they may be repeated at will. What stays and is never delivered was dropped. */
byte acquires[TOKENS + 1];
bool renews[TOKENS + 1], shorts[TOKENS + 1], deletes[TOKENS + 1];
byte copies = COPIES;


/* the one write that is late on its way to the resource: 0 for none, A + 1, B + 1, or PAST if its grant has ended */
byte late, lateFence;
#define PAST 3
bool stale;           /* ghost: a write of a newer grant has been accepted since */
byte seen;            /* the resource: the highest fence accepted */
byte lastFence;       /* ghost: of the last grant */

byte i, f;            /* scratch within a step */
mtype r = none;
int instant;          /* for traces only, else always 0 */
#ifdef TRACE
#define PASSES instant++
#else
#define PASSES instant = 0
#endif

#define NAME(x) (65 + x)
#define valid(x) (c[x].at == HOLD && c[x].left > 0)
#define max(x, y) ((x) > (y) -> (x) : (y))

/* The invariants that a grant could break. Who is not valid never becomes valid again without one. */
inline begin(x, n) {
	c[x].fence = n;
	printf("%d  %c: is granted the lock with fence %d, valid for %d\n", instant, NAME(x), n, c[x].left);
	assert(!(valid(x) && valid(1 - x))); /* valid holders are disjoint, over processes */
	assert(!c[x].old);                   /* valid holders are disjoint, within a process */
#if !defined(FENCE_AFTER_SET) && !defined(TOKEN_REUSED) /* these two are to show what comes of it */
	assert(n > lastFence);               /* fences rise */
#endif
	lastFence = n
}

inline ended(x) {
	if :: late == x + 1 -> late = PAST :: else fi
}

/* An attempt or lease is over; the next one has a token of its own. From now on all commands for this one may arrive at
 * any time, also some that were not sent: that only allows for more, and saves states. */
inline over(x) {
	renews[c[x].token] = true; shorts[c[x].token] = true; deletes[c[x].token] = true;
	ended(x); used(x);
	c[x].at = IDLE; c[x].left = 0; c[x].steady = 0; c[x].fence = 0; c[x].next = 0; c[x].old = false; c[x].sends = 0;
	c[x].early = 0;
#ifndef TOKEN_REUSED
	c[x].token++
#endif
}

/* Each command begins with sent = now(); an answer to an earlier one is not waited for any more. */
inline ask(x, what) {
	c[x].asked = what; c[x].age = 0; c[x].answer = none; c[x].answerFence = 0
}

inline used(x) { ask(x, NOTHING) }

#ifdef FROM_REPLY
#define AGE(x) 0
#else
#define AGE(x) c[x].age
#endif
#define rest(x) (TTL - D - AGE(x)) /* what is left of a lease that was asked for then */

/* Fence.Set(): what a protected resource does */
inline arrive(x, n) {
	f = n;
#ifdef FENCE_AFTER_SET
	counter++; f = counter; /* the writer asks for its fence now */
#endif
	if
#ifndef NO_FENCE_CHECK
	:: f < seen -> printf("%d      resource: refuses a write with fence %d\n", instant, f)
#endif
	:: else ->
		printf("%d      resource: accepts a write with fence %d\n", instant, f);
		seen = max(seen, f);
		if
		:: x == PAST -> assert(!stale) /* no stale write is accepted */
		:: x != PAST && late != 0 && late != x + 1 -> stale = true
		:: else
		fi
	fi;
	f = 0
}

proctype client(byte x; byte last) {
	do
	/* once(): a first try, or another with the same token as the outcome of the last is unknown, or it was held */
	:: d_step { c[x].at != HOLD && c[x].token <= last && c[x].sends < SENDS ->
#ifdef FENCE_BEFORE_SET
		if :: c[x].sends == 0 -> counter++; c[x].early = counter :: else fi;
#endif
		c[x].at = TRY; c[x].sends++; acquires[c[x].token]++;
		printf("%d  %c: once sends acquire, token %d\n", instant, NAME(x), c[x].token);
		ask(x, ACQUIRE) }

	/* once(): granted, but only before the deadline (the code wants a quarter of the TTL); else errLate */
	:: d_step { c[x].asked == ACQUIRE && (c[x].answer == granted || c[x].answer == own) ->
		c[x].left = rest(x); f = c[x].answerFence; i = (c[x].answer == granted && x == A -> f + 1 : 0);
#ifdef FENCE_BEFORE_SET
		f = c[x].early; i = 0;
#endif
		used(x);
		if
#ifdef GRANT_AFTER_DEADLINE
		:: true ->
#else
		:: c[x].left > 0 ->
#endif
			c[x].at = HOLD; c[x].sends = 0; c[x].next = i; begin(x, f)
		:: else ->
			printf("%d  %c: granted too late\n", instant, NAME(x))
		fi; f = 0; i = 0 }

	/* close(), sweepStrays(): give up; a delete is sent, and the token is finished */
	:: d_step { c[x].at == TRY ->
		printf("%d  %c: gives up, sweepStrays sends delete, token %d\n", instant, NAME(x), c[x].token);
		over(x) }

	/* renewAll(), renew() */
	:: d_step { valid(x) && late != x + 1 ->
		printf("%d  %c: renew sends, token %d\n", instant, NAME(x), c[x].token);
		renews[c[x].token] = true; ask(x, RENEW) }

	/* Extend() with less than the TTL, or renewal() near WithMaxHold: ttlLocked(). It can't move the deadline. */
	:: d_step { EXTENDS && valid(x) && late != x + 1 && !shorts[c[x].token] ->
		printf("%d  %c: Extend sends, for %d, token %d\n", instant, NAME(x), SHORT, c[x].token);
		shorts[c[x].token] = true }

	/* alarm(), checkLocked(): the deadline; then Release() or drop() sweeps */
	:: d_step { c[x].at == HOLD && c[x].left == 0 ->
		printf("%d  %c: lost at the deadline, a delete is sent, token %d\n", instant, NAME(x), c[x].token);
		over(x) }

	/* Release(): finish(), then the delete */
	:: d_step { valid(x) ->
		printf("%d  %c: Release sends delete, token %d\n", instant, NAME(x), c[x].token);
		over(x) }

	/* passOn(), pass(): the next grant of the process, under the same lease; nothing is sent */
#ifdef HANDOFF_AFTER_DEADLINE
	:: d_step { c[x].at == HOLD && c[x].next != 0 ->
#else
	:: d_step { valid(x) && c[x].next != 0 ->
#endif
#ifdef HANDOFF_LEAVES_OLD
		c[x].old = true;
#endif
#ifdef HANDOFF_KEEPS_FENCE
		f = c[x].fence;
#else
		f = c[x].next;
#endif
		c[x].next = 0;
		printf("%d  %c: pass, to the next in its process\n", instant, NAME(x));
		ended(x);
		begin(x, f); f = 0 }

	/* the holder looks at Valid() and writes; the write arrives at once, or any time later. Of those that are late, one
	 * is enough, and it may be the last thing that its grant does. */
	:: d_step { WRITES && valid(x) && late != x + 1 ->
		printf("%d  %c: is valid, writes with fence %d\n", instant, NAME(x), c[x].fence);
		arrive(x, c[x].fence) }
	:: d_step { WRITES && valid(x) && late == 0 ->
		printf("%d  %c: is valid, begins to write with fence %d\n", instant, NAME(x), c[x].fence);
		late = x + 1; lateFence = c[x].fence; used(x) }
	od
}

#define waits(x, t, what) (c[x].asked == what && c[x].token == t && c[x].answer == none)

/* raise in acquireScript: f is the first fence. A reserves one more, for who waits in its process: Count. */
inline raise(x) {
#if defined(FENCE_BEFORE_SET) || defined(FENCE_AFTER_SET)
	f = 0
#else
	f = counter + 1; counter = f + (x == A -> 1 : 0)
#endif
}

/* acquireScript; r is the answer */
inline acquire(x, t) {
	if
	:: key == 0 ->
		raise(x); key = t; keyTTL = TTL; r = granted
	:: key == t ->
#ifndef OWN_NOT_RAISED
		keyTTL = TTL;
#endif
		f = counter; r = own;
		if :: counter == 0 -> raise(x) :: else fi
	:: else -> r = held; f = 0
	fi;
	printf("%d      server: acquireScript, token %d: %e\n", instant, t, r);
	if
	:: waits(x, t, ACQUIRE) && r != held -> c[x].answer = r; c[x].answerFence = f
	:: else
	fi;
	r = none; f = 0
}

/* renewScript, and what the client does with the answer: at once, or never. An answer that is late gives less. */
inline renew(x, t, ttl1, heard) {
	if
#ifdef SHORTENS
	:: key == t -> keyTTL = ttl1
#else
	:: key == t -> keyTTL = max(keyTTL, ttl1)
#endif
	:: else
	fi;
	printf("%d      server: renewScript, token %d, for %d: %d\n", instant, t, ttl1, key == t);
	if
	:: heard && key == t -> /* renewed(), confirm(): the deadline moves, never back, unless it is over */
		f = rest(x); c[x].left = max(c[x].left, f); f = 0;
		printf("%d  %c: confirm, valid for %d\n", instant, NAME(x), c[x].left);
		used(x)
	:: heard && key != t -> /* renewed(), lose(errGone) */
		printf("%d  %c: lost, the key is gone\n", instant, NAME(x));
		over(x)
	:: else
	fi
}

/* The network and the server, for the messages of one token. */
proctype server(byte x; byte t) {
	do
	:: d_step { acquires[t] > 0 -> acquires[t]--; acquire(x, t) }
	:: d_step { acquires[t] > 0 && copies > 0 -> copies--; acquire(x, t) }
	:: d_step { renews[t] -> renew(x, t, TTL, false) }
	:: d_step { waits(x, t, RENEW) && valid(x) -> renew(x, t, TTL, true) }
	:: d_step { shorts[t] -> renew(x, t, SHORT, false) }
	/* releaseScript; its answer changes nothing */
#ifdef PLAIN_DEL
	:: d_step { deletes[t] && key != 0 ->
#else
	:: d_step { deletes[t] && key == t ->
#endif
		printf("%d      server: releaseScript, token %d\n", instant, t);
		assert(key == t); /* nobody deletes another's lock */
		key = 0; keyTTL = 0 }
	od
}

proctype resource() {
	do
	:: d_step { late == PAST -> arrive(PAST, lateFence); late = 0; lateFence = 0; stale = false }
	od
}

/* A client's clock goes on by one, or loses that tick; a tick that it uses for nothing does not count. */
#define counts(x) (c[x].left > 0 || c[x].asked != NOTHING && c[x].age < TTL - D)

inline advance(x, loses) {
	if
	:: !counts(x) -> c[x].steady = 0
	:: else ->
		if
		:: loses -> c[x].steady = TTL - 1
		:: else ->
			if :: c[x].steady > 0 -> c[x].steady-- :: else fi;
			if :: c[x].left > 0 -> c[x].left-- :: else fi;
			if :: c[x].asked != NOTHING && c[x].age < TTL - D -> c[x].age++ :: else fi;
			if :: c[x].asked == RENEW && c[x].age == TTL - D -> used(x) :: else fi
		fi
	fi
}

inline tick(a, b) {
	PASSES;
	if
	:: keyTTL > 0 -> keyTTL--; if :: keyTTL == 0 -> key = 0; printf("%d      server: the key has expired\n", instant) :: else fi
	:: else
	fi;
	advance(A, a); advance(B, b)
}

#define mayLose(x) (c[x].steady == 0 && counts(x))

proctype clocks() {
	do
	:: d_step { tick(false, false); printf("%d  tick\n", instant) }
	:: d_step { mayLose(A) -> tick(true, false); printf("%d  tick, which A's clock loses\n", instant) }
	:: d_step { mayLose(B) -> tick(false, true); printf("%d  tick, which B's clock loses\n", instant) }
	:: d_step { mayLose(A) && mayLose(B) -> tick(true, true); printf("%d  tick, which both clocks lose\n", instant) }
	od
}

#ifdef FORGETS_KEY
proctype failover() { d_step { key != 0 -> key = 0; keyTTL = 0; printf("%d      server: forgets the key\n", instant) } }
#endif
#ifdef FORGETS_COUNTER
proctype failover() { d_step { counter > 0 -> counter = 0; printf("%d      server: forgets the counter\n", instant) } }
#endif

init {
	atomic {
		c[A].answer = none; c[B].answer = none; c[A].token = 1; c[B].token = TOKENS_A + 1;
		run client(A, TOKENS_A); run client(B, TOKENS);
		i = 1;
		do
		:: i <= TOKENS_A -> run server(A, i); i++
		:: i > TOKENS_A && i <= TOKENS -> run server(B, i); i++
		:: else -> break
		od;
		i = 0;
		run resource(); run clocks();
#if defined(FORGETS_KEY) || defined(FORGETS_COUNTER)
		run failover()
#endif
	}
}
