package keys

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var prefixes = []string{"", "app1:", "{tenant}:", "a{t}b{u}", "}", "}}x", "é:", "lock:", "fence:"}

var names = []string{
	"job", "a", "a\x00b", "\xff", "\xfe", "é", "e\u0301", "with space", "two\nlines", "}", "}x", "{", "{}", "{}}", "{{}",
	"a}b{c", "{u1}:cart", "{{x}}", "{x}}", "{}{x}", "}{", "}{x}", "lock:", "fence:{lock:a}:a", strings.Repeat("x", 1<<20),
	strings.Repeat("}", 100), "{\x00}", "0", "}0", "a{",
}

func TestSlotsAreThoseOfTheClusterSpecification(t *testing.T) {
	for key, slot := range map[string]int{
		"123456789": 12739, "lock:job": 3647, "{lock:job}": 3647, "fence:job": 594, "": 0, "foo{}{bar}": Slot("foo{}{bar}"),
		"{user1000}.following": Slot("user1000"), "foo{{bar}}zap": Slot("{bar"), "foo{bar}{zap}": Slot("bar"),
	} {
		assert.Equal(t, slot, Slot(key), key)
	}
	assert.NotEqual(t, Slot("bar"), Slot("foo{}{bar}"), "an empty tag is none, and the next is not looked at")
}

func TestLockKeysAreThePrefixAndTheNameByteForByte(t *testing.T) {
	for _, prefix := range prefixes {
		for _, name := range names {
			require.Equal(t, prefix+"lock:"+name, Lock(prefix, name))
		}
	}
}

func TestBothKeysOfANameShareASlotAndThePrefix(t *testing.T) {
	for _, prefix := range prefixes {
		require.NoError(t, CheckPrefix(prefix))
		for _, name := range names {
			checkName(t, prefix, name)
		}
	}
}

func checkName(t *testing.T, prefix, name string) {
	t.Helper()
	l, f := Lock(prefix, name), Fence(prefix, name)
	require.Equal(t, Slot(l), Slot(f), "prefix %.50q name %.50q", prefix, name)
	require.True(t, strings.HasPrefix(f, prefix))
	require.Equal(t, name, nameOf(t, prefix, f), "the name can be read back, so no two names share a counter")
	require.False(t, strings.HasPrefix(f, prefix+"lock:"), "a counter is never a lock key of the same prefix")
}

// nameOf reads the name back from a fence key.
func nameOf(t *testing.T, prefix, fence string) string {
	t.Helper()
	rest, found := strings.CutPrefix(fence, prefix+"fence:")
	require.True(t, found)
	if tag(prefix) != "" {
		return rest
	}
	_, name, found := strings.Cut(rest, "}:")
	require.True(t, found)
	return name
}

func TestNoTwoNamesShareAnyKey(t *testing.T) {
	for _, prefix := range prefixes {
		var all []string
		for _, name := range names {
			all = append(all, Lock(prefix, name), Fence(prefix, name))
		}
		slices.Sort(all)
		require.Len(t, slices.Compact(all), 2*len(names))
	}
}

func TestAMarkSharesTheSlotOfItsKeyAndTellsIt(t *testing.T) {
	for _, key := range append(names, "") {
		checkMark(t, key)
	}
}

func checkMark(t *testing.T, key string) {
	t.Helper()
	mark := Mark(key)
	require.Equal(t, Slot(key), Slot(mark), "%.50q", key)
	require.Equal(t, key, keyOf(t, mark))
}

// keyOf reads a key back from its mark.
func keyOf(t *testing.T, mark string) string {
	t.Helper()
	if key, found := strings.CutSuffix(mark, ":fenced"); found {
		return key
	}
	if strings.HasSuffix(mark, "}") {
		return mark[:strings.LastIndex(mark, ":fenced:{")]
	}
	_, key, found := strings.Cut(mark, "}:")
	require.True(t, found)
	return strings.TrimSuffix(key, ":")
}

func TestAPrefixWithAnIncompleteTagIsRefused(t *testing.T) {
	for _, prefix := range []string{"{", "{}", "a{b", "}{", "{}{x}"} {
		require.Error(t, CheckPrefix(prefix), prefix)
	}
}

func TestEverySlotHasANumberOfAtMostSixDigits(t *testing.T) {
	for slot, n := range numbers() {
		require.Equal(t, slot, Slot(strconv.Itoa(n)))
		require.Less(t, n, 1_000_000)
	}
}

func FuzzKeysOfANameShareASlotAndTellIt(f *testing.F) {
	for _, prefix := range prefixes {
		for _, name := range names {
			if len(name) < 200 {
				f.Add(prefix, name)
			}
		}
	}
	f.Fuzz(func(t *testing.T, prefix, name string) {
		if CheckPrefix(prefix) != nil {
			return
		}
		checkName(t, prefix, name)
		checkMark(t, prefix+name)
	})
}

func BenchmarkFence(b *testing.B) {
	for name, arg := range map[string]string{"ordinary": "payment:42", "unpaired brace": "payment}42"} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				Fence("", arg)
			}
		})
	}
}
