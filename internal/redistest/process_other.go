//go:build !linux

package redistest

import "syscall"

// childAttr knows no way here to end a child with a test process that is killed.
func childAttr() *syscall.SysProcAttr { return nil }
