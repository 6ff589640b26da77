// Package report holds what the scenarios of a benchmark found, and writes it: [Section.Markdown] for one scenario,
// [Document] for a file with pictures beside it, below what was written there by hand.
package report

import (
	"fmt"
	"strings"
)

// Section is what one scenario found.
type Section struct {
	Title   string
	Text    string // what was measured, and how
	Tables  []Table
	Charts  []Chart
	Targets []Target
}

// Table is a part of a Section. Rows are as long as the head.
type Table struct {
	Text string // a sentence above it; may be empty
	Head []string
	Rows [][]string
}

// Add appends a row.
func (t *Table) Add(cells ...string) { t.Rows = append(t.Rows, cells) }

// Markdown returns the section with links to its charts in folder; without a folder they are left out.
func (s Section) Markdown(folder string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "## %s\n\n", s.Title)
	paragraph(&b, s.Text)
	for _, t := range s.Tables {
		paragraph(&b, t.Text)
		t.write(&b)
	}
	if folder != "" {
		for _, c := range s.Charts {
			fmt.Fprintf(&b, "![%s](%s/%s.svg)\n\n", c.Title, folder, c.Name)
		}
	}
	return b.String()
}

func paragraph(b *strings.Builder, text string) {
	if text != "" {
		fmt.Fprintf(b, "%s\n\n", text)
	}
}

func (t Table) write(b *strings.Builder) {
	line := func(cells []string) { fmt.Fprintf(b, "| %s |\n", strings.Join(cells, " | ")) }
	line(t.Head)
	b.WriteString("|" + strings.Repeat("---|", len(t.Head)) + "\n")
	for _, row := range t.Rows {
		line(row)
	}
	b.WriteString("\n")
}

// Target is something that was to be reached, and what was measured.
type Target struct {
	What, Limit, Measured string
	Met                   bool
}

// AtMost returns a target that is met by values up to limit. It shows the value as measured, which may say more.
func AtMost(what string, limit, value float64, measured string) Target {
	return Target{what, fmt.Sprintf("at most %.4g", limit), measured, value <= limit}
}

// AtLeast returns a target that is met by values from limit on.
func AtLeast(what string, limit, value float64, measured string) Target {
	return Target{what, fmt.Sprintf("at least %.4g", limit), measured, value >= limit}
}

// Targets returns a section with the targets of all sections; without a table if there are none.
func Targets(sections []Section) Section {
	t := Table{Head: []string{"", "target", "measured", "met"}}
	for _, s := range sections {
		for _, target := range s.Targets {
			met := "yes"
			if !target.Met {
				met = "**no**"
			}
			t.Add(target.What, target.Limit, target.Measured, met)
		}
	}
	s := Section{Title: "Targets"}
	if len(t.Rows) > 0 {
		s.Tables = []Table{t}
	}
	return s
}
