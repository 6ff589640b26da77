package report

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func sample() Section {
	s := Section{Title: "Waiting", Text: "How long.", Tables: []Table{{Head: []string{"", "time"}}}}
	s.Tables[0].Add("lock", "1 ms")
	s.Charts = []Chart{{Name: "waiting", Title: "Time", Series: []Series{{Name: "lock", X: []float64{1, 10}, Y: []float64{1, 2}}}}}
	s.Targets = []Target{AtMost("time", 1, 1, "1.0"), AtLeast("speed", 30, 29.9, "29.9")}
	return s
}

func TestWhatWasWrittenByHandStays(t *testing.T) {
	path := filepath.Join(t.TempDir(), "performance.md")
	hand := "# By hand\n\nIt names the line, " + Marker + ", which is none here.\n\n"
	if err := os.WriteFile(path, []byte(hand+Marker+"\nold figures\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second run finds what the first has left
		d, err := NewDocument(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Write("December\n\n", []Section{sample()}); err != nil {
			t.Fatal(err)
		}
		text := read(t, path)
		if !strings.HasPrefix(text, hand+Marker+"\n\nDecember\n\n## Targets\n") {
			t.Fatalf("the beginning is\n%s", text)
		}
		if strings.Contains(text, "old figures") || strings.Count(text, "## Waiting") != 1 {
			t.Fatalf("the rest is\n%s", text)
		}
	}
	read(t, filepath.Join(filepath.Dir(path), "performance", "waiting.svg"))
}

func TestAFileWithoutTheMarkerIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "precious.md")
	if err := os.WriteFile(path, []byte("# By hand\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := NewDocument(path); err == nil {
		t.Error("it was accepted")
	}
}

func TestADocumentCanBeNew(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new.md")
	d, err := NewDocument(path)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := d.Write("", []Section{sample()}); err != nil {
			t.Fatal(err)
		}
	}
	text := read(t, path)
	if !strings.HasPrefix(text, Marker+"\n\n## Targets\n") || strings.Count(text, Marker) != 1 {
		t.Errorf("it is\n%s", text)
	}
	if !strings.Contains(text, "![Time](new/waiting.svg)") {
		t.Errorf("no picture in\n%s", text)
	}
}

func TestTargetsAreMetOrNot(t *testing.T) {
	rows := Targets([]Section{sample()}).Tables[0].Rows
	for i, want := range []string{"time | at most 1 | 1.0 | yes", "speed | at least 30 | 29.9 | **no**"} {
		if got := strings.Join(rows[i], " | "); got != want {
			t.Errorf("%s, not %s", got, want)
		}
	}
	if len(Targets([]Section{{}}).Tables) != 0 {
		t.Error("a table without rows")
	}
}

func TestChartsAreSmallValidAndTheSameEachTime(t *testing.T) {
	curves := Chart{
		Title: "<cost> & growth", LogX: true, LogY: true,
		Series: []Series{
			{Name: "lock", X: []float64{1, 100, 1e6}, Y: []float64{3, 1, 2}},
			{Name: "a < b", X: []float64{1, 1e4}, Y: []float64{30, 500}},
		},
	}
	bars := Chart{Labels: []string{"one", "two & three"}, Series: []Series{{Name: "a", Y: []float64{1, 2}}, {Name: "b", Y: []float64{0, 3}}}}
	for _, c := range []Chart{curves, bars} {
		svg, err := c.SVG()
		if err != nil {
			t.Fatal(err)
		}
		again, err := c.SVG()
		if err != nil {
			t.Fatal(err)
		}
		if string(svg) != string(again) {
			t.Error("another picture the second time")
		}
		if len(svg) > 60<<10 {
			t.Errorf("%d bytes", len(svg))
		}
		wellFormed(t, string(svg))
	}
	if _, err := (Chart{}).SVG(); err == nil {
		t.Error("a chart of nothing")
	}
}

func wellFormed(t *testing.T, text string) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(text))
	for {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
