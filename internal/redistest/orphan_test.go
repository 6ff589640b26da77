package redistest_test

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-b640e7e9/lock/internal/redistest"
)

const orphanEnv = "REDISTEST_ORPHAN"

func TestServersDieWithATestProcessThatIsKilled(t *testing.T) {
	if os.Getenv(orphanEnv) != "" {
		fmt.Println("\naddr", redistest.Start(t, redistest.Redis7).Addr())
		select {} // until killed
	}
	child := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.timeout=1m")
	child.Env = append(os.Environ(), orphanEnv+"=1", "TMPDIR="+t.TempDir())
	out, err := child.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, child.Start())
	addr := ""
	for lines := bufio.NewScanner(out); addr == "" && lines.Scan(); {
		addr, _ = strings.CutPrefix(lines.Text(), "addr ")
		if addr == lines.Text() {
			addr = ""
		}
	}
	require.NotEmpty(t, addr)
	require.NoError(t, child.Process.Kill())
	_ = child.Wait()
	require.Eventually(t, func() bool {
		conn, err := net.Dial("tcp", addr)
		if err == nil {
			_ = conn.Close()
		}
		return err != nil
	}, 5*time.Second, time.Millisecond)
}
