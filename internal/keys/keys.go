// Package keys says where a name lives in Redis. Keys that one script touches have to be in one cluster slot, for
// every name that a user may think of, and two names must never share a key.
package keys

import (
	"errors"
	"strconv"
	"strings"
	"sync"
)

// CheckPrefix returns an error for a prefix that has an opening brace but no complete, non-empty hash tag: a name could
// complete the tag, and then the slots of the keys would depend on where the name has a brace.
func CheckPrefix(prefix string) error {
	if strings.Contains(prefix, "{") && tag(prefix) == "" {
		return errors.New("a prefix with a brace needs a complete hash tag, as in {tenant}")
	}
	return nil
}

// Lock returns the key that holds the token of a lease.
func Lock(prefix, name string) string { return prefix + "lock:" + name }

// Fence returns the key of the fence counter of a name. It begins with the prefix, is in the slot of Lock(prefix,
// name), and tells the name.
//
// A prefix with a hash tag brings all keys into one slot by itself. Otherwise the lock key's own tag is repeated, or the
// whole lock key becomes the tag; a lock key that can't be a tag, as it has a closing brace, is replaced by a number
// whose slot is the same.
func Fence(prefix, name string) string {
	if tag(prefix) != "" {
		return prefix + "fence:" + name
	}
	return prefix + "fence:{" + tagFor(Lock(prefix, name)) + "}:" + name
}

// Mark returns the key, in the slot of the given one, that keeps the highest fence with which the given one was
// written. It tells the given one; and, unless that has an opening brace without a tag, it begins with it, as access is
// often granted by prefix.
func Mark(key string) string {
	switch {
	case tag(key) != "":
		return key + ":fenced"
	case !strings.Contains(key, "{"):
		return key + ":fenced:{" + tagFor(key) + "}"
	default: // a brace that follows would complete a tag
		return "fenced:{" + tagFor(key) + "}:" + key + ":"
	}
}

// tagFor returns a hash tag that hashes to the slot of key: it has no closing brace and is not empty.
func tagFor(key string) string {
	if t := tag(key); t != "" {
		return t
	}
	if key != "" && !strings.Contains(key, "}") {
		return key
	}
	return strconv.Itoa(numbers()[Slot(key)])
}

// numbers has, for each slot, the smallest number whose decimal digits hash to it: six digits at most. It takes some
// milliseconds to make, once, and only if it is needed.
var numbers = sync.OnceValue(func() *[Slots]int {
	var table [Slots]int
	for n, missing := 1, Slots-1; missing > 0; n++ { // "0" is right where the table says 0
		slot := Slot(strconv.Itoa(n))
		if table[slot] == 0 && slot != Slot("0") {
			table[slot] = n
			missing--
		}
	}
	return &table
})
