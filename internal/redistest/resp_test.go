package redistest

import (
	"bufio"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestAValueIsReadToItsEndAndNoFurther(t *testing.T) {
	for _, value := range []string{
		"+OK\r\n", "-ERR no\r\n", ":1\r\n", "_\r\n", "#t\r\n", ",1.5\r\n", "(12345678901234567890\r\n",
		"$-1\r\n", "$0\r\n\r\n", "$4\r\na\r\nb\r\n", "=7\r\ntxt:abc\r\n", "!5\r\nERR x\r\n",
		"*-1\r\n", "*0\r\n", "*2\r\n*1\r\n:1\r\n$1\r\na\r\n", "~1\r\n+a\r\n", "%1\r\n+a\r\n*1\r\n:2\r\n",
		">3\r\n+message\r\n$1\r\nc\r\n$2\r\n\r\n\r\n", "|1\r\n+ttl\r\n:1\r\n$1\r\na\r\n",
	} {
		r := bufio.NewReader(strings.NewReader(value + "+next\r\n"))
		got, err := readValue(r, nil)
		require.NoError(t, err, "%q", value)
		assert.Equal(t, value, string(got))
		rest, _ := io.ReadAll(r)
		assert.Equal(t, "+next\r\n", string(rest), "after %q", value)
	}
}

func TestABrokenValueIsAnError(t *testing.T) {
	for _, value := range []string{"", "+OK", "$5\r\nabc", "$x\r\n", "*2\r\n:1\r\n", "*x\r\n", "*1\r\n$9\r\nab\r\n"} {
		_, err := readValue(bufio.NewReader(strings.NewReader(value)), nil)
		assert.Error(t, err, "%q", value)
	}
}

func TestCommandsAreReadAsArraysAndAsLines(t *testing.T) {
	r := bufio.NewReader(strings.NewReader("*2\r\n$3\r\nGET\r\n$3\r\na\r\n\r\nPING  hello\r\n"))
	args, raw, err := readCommand(r)
	require.NoError(t, err)
	assert.Equal(t, []string{"GET", "a\r\n"}, args)
	assert.Equal(t, "*2\r\n$3\r\nGET\r\n$3\r\na\r\n\r\n", string(raw))
	args, _, err = readCommand(r)
	require.NoError(t, err)
	assert.Equal(t, []string{"PING", "hello"}, args)
}
