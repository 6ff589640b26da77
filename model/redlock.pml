/*
 * The protocol of package redlock, for Spin: three nodes, a quorum of two, two processes A and B that want one name.
 * Times and switches are as in lock.pml; README.md says more.
 */
#ifndef TTL
#define TTL 3
#endif
#ifndef TOKENS_A
#define TOKENS_A 2    /* how many votes A may hold, and B */
#endif
#ifndef TOKENS_B
#define TOKENS_B 1
#endif
#ifndef FENCES
#define FENCES 1      /* whether grants have fences */
#endif
#ifndef LEFT
#define LEFT 0        /* whether deletes are counted, to see what is left behind: that one process can show */
#endif
#ifndef UNEVEN
#define UNEVEN 0      /* whether the counters differ in the beginning, as votes were not won everywhere */
#endif
#ifndef LOWER
#define LOWER 0       /* whether a fence that is lower is let pass, to look for one that is given twice */
#endif
#ifndef RENEWS
#define RENEWS 1      /* whether A renews */
#endif
#ifdef NO_DRIFT
#define D 0
#else
#define D 1           /* drift(): what a client's clock may lose on those of the nodes within a TTL */
#endif
#ifdef BACK_WITHOUT_BOTH
#define BACK_WITHOUT_TOKEN
#define BACK_WITHOUT_MAX
#endif
#ifdef QUORUM_LESS
#define QUORUM 1
#else
#define QUORUM 2
#endif
#define A 0
#define B 1
#define TOKENS (TOKENS_A + TOKENS_B)
#define ALL 7

/* where a client is */
#define IDLE 0
#define VOTE 1        /* take() waits */
#define BACK 2        /* agree() waits for the fence to be written back */
#define HOLD 3

typedef Client {
	byte at;
	byte token;       /* of the vote or lease; each vote has its own */
	byte yes;         /* nodes that said yes to the vote, the write-back or the round of renewal; a bit for each */
	byte lost;        /* nodes that said in the round that they do not have the token */
	bool round;       /* a round of renewal is under way */
	byte top;         /* the highest fence among the answers, and how many nodes gave it */
	byte agree;
	byte age;         /* since sent, which is taken before any request can arrive */
	byte left;        /* until the deadline, on its own clock */
	byte steady       /* ticks until its clock may lose one again */
};
Client c[2];

typedef Node { byte key; byte ttl; byte counter };
Node n[3];

/* The set of messages: for each token the nodes where one may arrive yet. One that never does was dropped. Renewals are
 * not kept: they may arrive at any time while there is a lease, also some that were not sent, which only allows for more;
 * those that arrive when it is over only keep others out. */
typedef Messages {
	byte acquires, installs, backs;
	byte deletes;     /* without LEFT they may be repeated for ever */
	byte floor;       /* what backs carries */
	bool finished     /* the lease or vote is over */
};
Messages m[TOKENS + 1];

byte lastFence;       /* ghost: of the last grant */

byte f;               /* scratch within a step */
int instant;          /* for traces only, else always 0 */
#ifdef TRACE
#define PASSES instant++
#else
#define PASSES instant = 0
#endif

#define NAME(x) (65 + x)
#define valid(x) (c[x].at == HOLD && c[x].left > 0)
#define max(x, y) ((x) > (y) -> (x) : (y))
#define gone(x) (c[x].token > (x == A -> TOKENS_A : TOKENS))
#define enough(s) (((s) & 1) + ((s) >> 1 & 1) + ((s) >> 2 & 1) >= QUORUM)
#define bit(k) (1 << (k))

inline begin(x) {
	c[x].left = TTL - D - c[x].age;
	if
	:: c[x].left > 0 ->
		printf("%d  %c: is granted the lock with fence %d, valid for %d\n", instant, NAME(x), c[x].top, c[x].left);
		c[x].at = HOLD;
		assert(!valid(1 - x));                       /* valid holders are disjoint */
		assert(!FENCES || c[x].top > lastFence || LOWER && c[x].top < lastFence); /* fences rise */
		lastFence = c[x].top * FENCES;
		quiet(x);
		if :: !LEFT && gone(1 - x) -> finish() :: else fi
	:: else ->
		printf("%d  %c: granted too late\n", instant, NAME(x));
		over(x)
	fi
}

inline quiet(x) { c[x].yes = 0; c[x].lost = 0; c[x].round = false; c[x].top = 0; c[x].agree = 0; c[x].age = 0 }

/* giveBack(), Release(), verdict(): the token is given up at all nodes. */
inline over(x) {
	m[c[x].token].deletes = ALL; m[c[x].token].finished = true;
	leave(x); c[x].token++;
	if
	:: !LEFT && gone(x) && (!FENCES || gone(1 - x) || c[1 - x].at == HOLD) -> finish()
	:: else
	fi
}

/* Nothing can be broken any more: one client is gone, and the other is alone with its last grant, or has no fences that
 * could be wrong. One state stands for all that may follow. */
inline finish() {
	leave(A); leave(B); c[A].token = TOKENS + 1; c[B].token = TOKENS + 1; lastFence = 0;
	for (f : 1 .. TOKENS) {
		m[f].acquires = 0; m[f].installs = 0; m[f].backs = 0; m[f].floor = 0; m[f].deletes = 0; m[f].finished = true
	}
	for (f : 0 .. 2) { n[f].key = 0; n[f].ttl = 0; n[f].counter = 0 }
	f = 0
}

inline leave(x) { quiet(x); c[x].at = IDLE; c[x].left = 0; c[x].steady = 0 }

proctype client(byte x; byte last) {
	do
	/* take(): all nodes are asked at the same time */
	:: d_step { c[x].at == IDLE && c[x].token <= last ->
		printf("%d  %c: take asks all nodes, token %d\n", instant, NAME(x), c[x].token);
		c[x].at = VOTE; m[c[x].token].acquires = ALL }

	/* grant(), agree(): a quorum has given one and the same fence; or there are none */
	:: d_step { c[x].at == VOTE && enough(c[x].yes) && (!FENCES || c[x].agree >= QUORUM) -> begin(x) }

	/* agree(): the highest fence is written back, to those who said yes or nothing yet */
	:: d_step { c[x].at == VOTE && enough(c[x].yes) && FENCES && c[x].agree < QUORUM ->
		printf("%d  %c: agree writes fence %d back, token %d\n", instant, NAME(x), c[x].top, c[x].token);
		m[c[x].token].backs = c[x].yes | m[c[x].token].acquires; m[c[x].token].floor = c[x].top;
		c[x].at = BACK; c[x].yes = 0; c[x].agree = 0 }
	:: d_step { c[x].at == BACK && enough(c[x].yes) -> begin(x) }

	/* giveBack(): the vote is lost, or takes too long */
	:: d_step { c[x].at == VOTE || c[x].at == BACK ->
		printf("%d  %c: gives back, token %d\n", instant, NAME(x), c[x].token);
		over(x) }

	/* renew(): a round */
	:: d_step { RENEWS && x == A && valid(x) ->
		printf("%d  %c: renew asks all nodes, token %d\n", instant, NAME(x), c[x].token);
		quiet(x); c[x].round = true }

	/* checkLocked(): the deadline; then the token is given up */
	:: d_step { c[x].at == HOLD && c[x].left == 0 ->
		printf("%d  %c: lost at the deadline\n", instant, NAME(x));
		over(x) }

	/* Release() */
	:: d_step { valid(x) ->
		printf("%d  %c: Release, token %d\n", instant, NAME(x), c[x].token);
		over(x) }
	od
}

/* took(): when a key appears after the token was given up, a delete is still to come. */
inline appears(t, k) {
	assert(!m[t].finished || m[t].deletes & bit(k)) /* nothing is left behind */
}

/* acquireScript at node k, and answer() */
inline acquire(x, t, k) {
	m[t].acquires = m[t].acquires & ~bit(k);
	if
	:: n[k].key == 0 || n[k].key == t ->
		if :: n[k].key == 0 -> n[k].counter = n[k].counter + FENCES; n[k].key = t; appears(t, k) :: else fi;
		n[k].ttl = TTL;
		printf("%d      node %d: acquireScript, token %d: yes, %d\n", instant, k, t, n[k].counter);
		if
		:: c[x].at == VOTE && c[x].token == t ->
			c[x].yes = c[x].yes | bit(k);
			if
			:: n[k].counter > c[x].top -> c[x].top = n[k].counter; c[x].agree = 1
			:: n[k].counter == c[x].top -> c[x].agree++
			:: else
			fi
		:: else
		fi
	:: else -> printf("%d      node %d: acquireScript, token %d: held\n", instant, k, t)
	fi
}

/* prolongScript without a Count at node k, for agree() */
inline back(x, t, k) {
	m[t].backs = m[t].backs & ~bit(k);
	if
#ifdef BACK_WITHOUT_TOKEN
	:: true ->
#else
	:: n[k].key == t ->
		n[k].ttl = TTL;
#endif
#ifdef BACK_WITHOUT_MAX
		n[k].counter = m[t].floor;
#else
		n[k].counter = max(n[k].counter, m[t].floor);
#endif
		printf("%d      node %d: the fence %d is written back, token %d\n", instant, k, m[t].floor, t);
		if :: c[x].at == BACK && c[x].token == t -> c[x].yes = c[x].yes | bit(k) :: else fi
	:: else -> printf("%d      node %d: the fence %d is not written back, token %d is gone\n", instant, k, m[t].floor, t)
	fi
}

/* renewScript at node k; batch.answer(), restore(), install(), confirm() */
inline renew(x, t, k, heard) {
	if :: n[k].key == t -> n[k].ttl = TTL :: else fi;
#ifdef COUNTS_WHEN_INSTALLED
	if :: n[k].key == 0 && heard -> n[k].key = t; n[k].ttl = TTL :: else fi;
#endif
	printf("%d      node %d: renewScript, token %d: %d\n", instant, k, t, n[k].key == t);
	if
	:: heard ->
		if
		:: n[k].key == t -> c[x].yes = c[x].yes | bit(k)
		:: else -> c[x].lost = c[x].lost | bit(k)
#ifdef COUNTS_INSTALLS
			; c[x].yes = c[x].yes | bit(k)
#endif
		fi;
		if
		:: enough(c[x].yes) ->
			f = TTL - D - c[x].age; c[x].left = max(c[x].left, f); f = 0;
			printf("%d  %c: confirm, valid for %d\n", instant, NAME(x), c[x].left);
			m[t].installs = m[t].installs | c[x].lost & ~m[t].acquires;
			quiet(x) /* an answer that comes now and leads to another install is no different from one before */
		:: !enough(c[x].yes) && enough(c[x].lost) ->
			printf("%d  %c: lost, a quorum does not have the token\n", instant, NAME(x));
			over(x)
		:: else
		fi
	:: else
	fi
}

/* install(): acquireScript at node k, for a node that had lost the token */
inline install(x, t, k) {
	m[t].installs = m[t].installs & ~bit(k);
	if
#ifdef INSTALLS_OVER_OTHERS
	:: true ->
#else
	:: n[k].key == 0 || n[k].key == t ->
#endif
		printf("%d      node %d: the token is installed again, token %d\n", instant, k, t);
		assert(n[k].key == 0 || n[k].key == t || !valid(1 - x)); /* nobody takes away another's lock */
		n[k].key = t; n[k].ttl = TTL; appears(t, k)
	:: else -> printf("%d      node %d: the token is not installed, token %d\n", instant, k, t)
	fi
}

/* release(): where the key may appear yet the delete waits for that */
#if defined(DELETES_BEFORE_ACQUIRES)
#define COMES(t) m[t].installs
#elif defined(DELETES_BEFORE_INSTALLS)
#define COMES(t) m[t].acquires
#else
#define COMES(t) (m[t].acquires | m[t].installs)
#endif

/* Node k, and the network, for the messages of one token. */
proctype node(byte k; byte x; byte t) {
	do
	/* nodes that are alike are numbered as A's first vote reaches them */
	:: d_step { m[t].acquires & bit(k) && (UNEVEN || t != 1 || k == 0 || !(m[t].acquires & bit(k) / 2)) -> acquire(x, t, k) }
	:: d_step { m[t].backs & bit(k) -> back(x, t, k) }
	:: d_step { RENEWS && x == A && c[x].at == HOLD && c[x].token == t && n[k].key == t && n[k].ttl < TTL -> renew(x, t, k, false) }
	:: d_step { c[x].round && c[x].token == t && valid(x) && !((c[x].yes | c[x].lost) & bit(k)) -> renew(x, t, k, true) }
	:: d_step { m[t].installs & bit(k) -> install(x, t, k) }
	/* releaseScript */
	:: d_step { m[t].deletes & ~COMES(t) & bit(k) && (LEFT || n[k].key == t) ->
		printf("%d      node %d: releaseScript, token %d: %d\n", instant, k, t, n[k].key == t);
		if :: LEFT -> m[t].deletes = m[t].deletes & ~bit(k) :: else fi;
		if :: n[k].key == t -> n[k].key = 0; n[k].ttl = 0 :: else fi }
	od
}

/* As in lock.pml. */
#define voting(x) ((c[x].at == VOTE || c[x].at == BACK || c[x].round) && c[x].age < TTL - D)
#define counts(x) (c[x].left > 0 || voting(x))

inline advance(x, loses) {
	if
	:: !counts(x) -> c[x].steady = 0
	:: counts(x) && loses -> c[x].steady = TTL - 1
	:: else ->
		if :: c[x].steady > 0 -> c[x].steady-- :: else fi;
		if :: voting(x) -> c[x].age++ :: else fi;
		if :: c[x].left > 0 -> c[x].left-- :: else fi;
		if :: c[x].round && c[x].age == TTL - D -> quiet(x) :: else fi
	fi
}

inline expire(k) {
	if
	:: n[k].ttl > 0 -> n[k].ttl--; if :: n[k].ttl == 0 -> n[k].key = 0; printf("%d      node %d: the key has expired\n", instant, k) :: else fi
	:: else
	fi
}

inline tick(a, b) { PASSES; expire(0); expire(1); expire(2); advance(A, a); advance(B, b) }

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
proctype restart(byte k) { d_step { n[k].key != 0 -> n[k].key = 0; n[k].ttl = 0; printf("%d      node %d: forgets the key\n", instant, k) } }
#endif
#ifdef FORGETS_COUNTER
proctype restart(byte k) { d_step { n[k].counter > 0 -> n[k].counter = 0; printf("%d      node %d: forgets the counter\n", instant, k) } }
#endif

init {
	atomic {
		c[A].token = 1; c[B].token = TOKENS_A + 1;
		n[0].counter = 2 * UNEVEN; n[1].counter = UNEVEN;
		run client(A, TOKENS_A); run client(B, TOKENS);
		f = 1;
		do
		:: f <= TOKENS_A -> run node(0, A, f); run node(1, A, f); run node(2, A, f); f++
		:: f > TOKENS_A && f <= TOKENS -> run node(0, B, f); run node(1, B, f); run node(2, B, f); f++
		:: else -> break
		od;
		f = 0;
		run clocks();
#if defined(FORGETS_KEY) || defined(FORGETS_COUNTER)
		run restart(1)
#endif
	}
}
