package report

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Marker is the line below which a file belongs to the benchmark. What is above it was written by hand.
const Marker = "<!-- Written by: go run . -doc ../docs/performance.md (in bench/). All below is replaced by the next run. -->"

// Document is a Markdown file, with its pictures in a folder beside it that has the file's name.
type Document struct{ path string }

// NewDocument returns the document at path. A file that is there and has no marker is refused: nothing of it may be
// replaced.
func NewDocument(path string) (*Document, error) {
	d := &Document{path}
	if _, err := d.head(); err != nil {
		return nil, err
	}
	return d, nil
}

// head returns what was written by hand.
func (d *Document) head() (string, error) {
	text, err := os.ReadFile(d.path)
	if errors.Is(err, os.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	head, _, found := strings.Cut("\n"+string(text), "\n"+Marker+"\n")
	if !found {
		return "", fmt.Errorf("%s has no line %q", d.path, Marker)
	}
	return strings.TrimPrefix(head+"\n", "\n"), nil
}

// Write replaces what is below the marker by an introduction, the table of targets and the sections, and draws the charts.
func (d *Document) Write(introduction string, sections []Section) error {
	folder := strings.TrimSuffix(filepath.Base(d.path), filepath.Ext(d.path))
	if err := drawAll(filepath.Join(filepath.Dir(d.path), folder), sections); err != nil {
		return err
	}
	head, err := d.head()
	if err != nil {
		return err
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s%s\n\n%s", head, Marker, introduction)
	if t := Targets(sections); len(t.Tables) > 0 {
		b.WriteString(t.Markdown(""))
	}
	for _, s := range sections {
		b.WriteString(s.Markdown(folder))
	}
	return os.WriteFile(d.path, []byte(strings.TrimRight(b.String(), "\n")+"\n"), 0o644)
}

func drawAll(folder string, sections []Section) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	for _, s := range sections {
		for _, c := range s.Charts {
			svg, err := c.SVG()
			if err != nil {
				return fmt.Errorf("picture %s: %w", c.Name, err)
			}
			if err := os.WriteFile(filepath.Join(folder, c.Name+".svg"), svg, 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}
