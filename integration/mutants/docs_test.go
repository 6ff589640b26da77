package mutants

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestTheDocsHaveTheTable prints what is missing there.
func TestTheDocsHaveTheTable(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", "reliability.md"))
	require.NoError(t, err)
	for _, m := range All {
		require.Contains(t, string(text), row(m))
	}
}

func row(m Mutant) string {
	where := ""
	if m.Package != root {
		where = path.Base(m.Package) + ": "
	}
	return fmt.Sprintf("| %s | %s`%s` |\n", m.Name, where, m.Run)
}
