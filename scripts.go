package lock

import (
	"crypto/sha1" // what Redis names scripts by
	"encoding/hex"
)

// script is Lua text and the hash that it is called by, as arguments of commands.
type script struct{ text, sha any }

func newScript(text string) *script {
	sum := sha1.Sum([]byte(text))
	return &script{text: text, sha: hex.EncodeToString(sum[:])}
}

// raise is Lua that raises the fence counter: by a number, from at least floor and, if mode says so, from the server's
// clock in microseconds; the local fence is then the counter, as a string. Fences travel as strings and are compared by
// length and then bytes, as Lua's numbers are exact up to 2^53 only; INCRBY adds exactly.
const raise = `
  if mode == 'clock' then
    local t = redis.call('TIME')
    local now = string.format('%.0f', t[1] * 1000000 + t[2] - 1)
    if #now > #floor or (#now == #floor and now > floor) then
      floor = now
    end
  end
  local last = floor ~= '0' and redis.call('GET', KEYS[2]) or '0'
  if #floor > #last or (#floor == #last and floor > last) then
    redis.call('SET', KEYS[2], floor)
  end
  redis.call('INCRBY', KEYS[2], by)
  fence = redis.call('GET', KEYS[2])
`

// refusal is Lua that ends a script which has found another value than the token, or none, with the READONLY error of a
// replica: a replica answers reads, although it may be behind, so the script tries a write that changes nothing. Then
// nothing has been learnt. On a primary the script goes on.
const refusal = `
  local probe
  if value then
    probe = redis.pcall('SET', KEYS[1], '', 'PX', 1, 'NX')
  else
    probe = redis.pcall('DEL', KEYS[1])
  end
  if type(probe) == 'table' and probe.err and string.find(probe.err, 'READONLY', 1, true) then
    return probe
  end
`

// notMine ends a script that has found another value than the token, or none.
const notMine = refusal + `
return 0
`

// acquireScript takes a lease.
//
//	KEYS   lock [, fence counter]
//	ARGV   token, TTL in ms [, how many fences, "counter" or "clock"]
//	reply  held by another: {its PTTL, the start of its token's hash}; granted: the last of the fences, as a string;
//	       granted to the same token before: {the counter}
//
// A repeat finds its own token and changes nothing but a TTL that is too short. The counter rises before the key is
// set: if it can't rise there is no lock, and numbers that nobody got are only skipped.
var acquireScript = newScript(`
local value = redis.call('GET', KEYS[1])
if value and value ~= ARGV[1] then
` + refusal + `
  return {redis.call('PTTL', KEYS[1]), string.sub(redis.sha1hex(value), 1, 16)}
end
if value then
  if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
  end
end
local fence = '0'
if KEYS[2] then
  fence = value and redis.call('GET', KEYS[2])
end
if not fence then
  local by, floor, mode = ARGV[3], '0', ARGV[4]
` + raise + `
end
if value then
  return {fence}
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return fence
`)

// renewScript raises the TTL of a lease.
//
//	KEYS   lock
//	ARGV   token, TTL in ms
//	reply  1, or 0 if the key is gone or another's
//
// A repeat, also a late one, never shortens a TTL, and does nothing once the token is gone.
var renewScript = newScript(`
local value = redis.call('GET', KEYS[1])
if value == ARGV[1] then
  if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
  end
  return 1
end
` + notMine)

// prolongScript raises the TTL of a lease that several grants are to share, reserves their fences and asks who else
// listens.
//
//	KEYS   lock [, fence counter]
//	ARGV   token, TTL in ms [, how many fences, the highest known, "counter" or "clock"]
//	reply  {listeners, the last of the fences as a string}, or 0 if the key is gone or another's; listeners is -1 if the
//	       server does not tell
//
// A repeat reserves other numbers, above; those of a reply that was lost are only skipped.
var prolongScript = newScript(`
local value = redis.call('GET', KEYS[1])
if value == ARGV[1] then
  local fence = '0'
  if KEYS[2] then
    local by, floor, mode = ARGV[3], ARGV[4], ARGV[5]
` + raise + `
  end
  if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
  end
  local listeners = redis.pcall('PUBSUB', 'SHARDNUMSUB', KEYS[1])
  if listeners.err and string.find(string.lower(listeners.err), 'unknown') then
    listeners = redis.pcall('PUBSUB', 'NUMSUB', KEYS[1])
  end
  return {listeners.err and -1 or listeners[2], fence}
end
` + notMine)

// tell is Lua that ends a script: it wakes those who listen to the key, and returns how many they are plus one, or a list with
// the reason why they were not told. The channel is the key itself, as a suffix could lie in another slot. Nothing it
// does can fail the script.
const tell = `
  if ARGV[2] == 'tell nobody' then
    return {}
  end
  local told = redis.pcall('SPUBLISH', KEYS[1], ARGV[2])
  if type(told) == 'table' and string.find(string.lower(told.err), 'unknown') then
    told = redis.pcall('PUBLISH', KEYS[1], ARGV[2])
  end
  if type(told) == 'table' then
    return {told.err}
  end
  return told + 1
`

// tellNobody is what the script gets where publishing is refused.
const tellNobody = "tell nobody"

// releaseScript ends a lease.
//
//	KEYS   lock
//	ARGV   token, what to tell or "tell nobody"
//	reply  what tell returns, or 0 if the key is gone or another's
//
// A repeat answers 0: who sends it again has to remember that the first may have worked.
var releaseScript = newScript(`
local value = redis.call('GET', KEYS[1])
if value == ARGV[1] then
  redis.call('DEL', KEYS[1])
` + tell + `
end
` + notMine)

// holdScript ends a lease but leaves the key for a while, with a value that no late renewal of the token matches.
//
//	KEYS   lock
//	ARGV   token, what to tell or "tell nobody", the value that stays, how long in ms
//	reply  what tell returns, or 0 if the key is gone or another's
//
// A repeat finds the value that the first has left and succeeds as well. SET is refused when memory is short; then
// the token itself stays that long.
var holdScript = newScript(`
local value = redis.call('GET', KEYS[1])
if value == ARGV[1] then
  local set = redis.pcall('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
  if type(set) == 'table' and set.err then
    redis.call('PEXPIRE', KEYS[1], ARGV[4])
  end
end
if value == ARGV[1] or value == ARGV[3] then
` + tell + `
end
` + notMine)
