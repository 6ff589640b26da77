package redistest

import (
	"os"
	"os/exec"
	"runtime"
	"syscall"
)

// process is a running server process, for as long as the test process lives.
type process struct {
	cmd    *exec.Cmd
	exited chan struct{}
}

// startProcess runs a program, whose output is appended to the file log.
func startProcess(log string, argv []string) (*process, error) {
	out, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	p := &process{cmd: exec.Command(argv[0], argv[1:]...), exited: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = out, out
	p.cmd.SysProcAttr = childAttr()
	started := make(chan error)
	go p.run(started)
	return p, <-started
}

// run keeps the thread that starts the child: the child dies with it (see childAttr).
func (p *process) run(started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := p.cmd.Start()
	started <- err
	if err == nil {
		_ = p.cmd.Wait()
	}
	close(p.exited)
}

func (p *process) signal(sig syscall.Signal) error {
	return p.cmd.Process.Signal(sig)
}

// kill returns when the process is gone. A stopped process is no exception.
func (p *process) kill() {
	_ = p.signal(syscall.SIGKILL)
	<-p.exited
}
