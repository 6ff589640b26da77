package redistest

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// readCommand reads one client command, and the bytes it came as.
func readCommand(r *bufio.Reader) (args []string, raw []byte, err error) {
	raw, err = readValue(r, nil)
	if err != nil {
		return nil, nil, err
	}
	if raw[0] != '*' {
		return strings.Fields(string(raw)), raw, nil // an inline command, as typed into a terminal
	}
	header, rest := cutLine(raw)
	n, err := strconv.Atoi(header[1:])
	if err != nil {
		return nil, nil, fmt.Errorf("redistest: command header %q", header)
	}
	for range n {
		var arg string
		if arg, rest, err = cutString(rest); err != nil {
			return nil, nil, err
		}
		args = append(args, arg)
	}
	return args, raw, nil
}

// readValue appends one whole RESP2 or RESP3 value, with all that is nested in it, to dst, byte for byte.
func readValue(r *bufio.Reader, dst []byte) ([]byte, error) {
	line, err := r.ReadBytes('\n')
	if err != nil {
		return nil, err
	}
	dst = append(dst, line...)
	switch line[0] {
	case '$', '=', '!':
		return readBlob(r, dst, line)
	case '*', '~', '>':
		return readNested(r, dst, line, 1, 0)
	case '%':
		return readNested(r, dst, line, 2, 0)
	case '|': // an attribute stands before the value that it belongs to
		return readNested(r, dst, line, 2, 1)
	}
	return dst, nil
}

func readBlob(r *bufio.Reader, dst, line []byte) ([]byte, error) {
	n, err := length(line)
	if err != nil || n < 0 {
		return dst, err
	}
	start := len(dst)
	dst = append(dst, make([]byte, n+2)...)
	_, err = io.ReadFull(r, dst[start:])
	return dst, err
}

// readNested reads the per*length+more values that an aggregate consists of.
func readNested(r *bufio.Reader, dst, line []byte, per, more int) ([]byte, error) {
	n, err := length(line)
	for range n*per + more {
		if err != nil {
			return nil, err
		}
		dst, err = readValue(r, dst)
	}
	return dst, err
}

func length(line []byte) (int, error) {
	n, err := strconv.Atoi(string(bytes.TrimSpace(line[1:])))
	if err != nil {
		return 0, fmt.Errorf("redistest: length in %q", line)
	}
	return n, nil
}

// firstString returns the string that an array or push begins with, in lower case: what kind of message it is. It is
// empty for any other value.
func firstString(raw []byte) string {
	if raw[0] != '*' && raw[0] != '>' {
		return ""
	}
	_, rest := cutLine(raw)
	s, _, err := cutString(rest)
	if err != nil {
		return ""
	}
	return strings.ToLower(s)
}

// cutString cuts the string that raw begins with off the rest.
func cutString(raw []byte) (s string, rest []byte, err error) {
	header, rest := cutLine(raw)
	if strings.HasPrefix(header, "+") {
		return header[1:], rest, nil
	}
	if !strings.HasPrefix(header, "$") {
		return "", nil, fmt.Errorf("redistest: %q is not a string", header)
	}
	n, err := strconv.Atoi(header[1:])
	if err != nil || n < 0 || n+2 > len(rest) {
		return "", nil, fmt.Errorf("redistest: string header %q", header)
	}
	return string(rest[:n]), rest[n+2:], nil
}

func cutLine(raw []byte) (line string, rest []byte) {
	head, rest, _ := bytes.Cut(raw, []byte("\r\n"))
	return string(head), rest
}
