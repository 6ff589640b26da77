package redistest

import "syscall"

// childAttr makes the kernel end a child with the thread that started it, even where that is killed itself.
func childAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
