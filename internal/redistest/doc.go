// Package redistest gives tests a Redis of every kind, and a network that fails on demand.
//
// For virtual time there is [Mini], an in-memory server, with [MiniClient]: both work inside a testing/synctest bubble,
// where hours pass in no time, and outside it.
//
// For the real thing there are [Start], [StartCluster] and [StartSentinel], which run private server processes, and
// [Shared], one server for a whole test process; a TestMain that calls [Main] ends it. The binaries come from Debian
// packages by way of servers.sh in this folder. Where one is missing a test is skipped, or fails if CI=true.
//
// A [Proxy] stands between a client and either of them. It understands the protocol, so that a [Rule] can lose the
// reply of exactly the third SET, or let a command arrive after its sender has given up.
//
// Everything is closed by the Cleanup of the test that opened it. Inside a bubble that is still inside the bubble.
package redistest
