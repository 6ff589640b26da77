package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// childJob is the variable that makes a process one of those that work for another: it holds a job.
const childJob = "LOCK_BENCH_JOB"

// job is what a child does: one of these. Its result goes to stdout, as JSON.
type job struct {
	Contend *contendJob
	Hold    *holdJob
	Repeat  *repeatJob
}

func child(text string) error {
	var j job
	if err := json.Unmarshal([]byte(text), &j); err != nil {
		return err
	}
	result, err := j.run()
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(result)
}

func (j job) run() (any, error) {
	switch {
	case j.Contend != nil:
		return j.Contend.run()
	case j.Hold != nil:
		return j.Hold.run()
	case j.Repeat != nil:
		return j.Repeat.run()
	default:
		return nil, errors.New("a job without work")
	}
}

// environment is that of a child that does the job.
func (j job) environment() []string {
	text, err := json.Marshal(j)
	if err != nil {
		panic(err) // it is made of texts and numbers
	}
	return append(os.Environ(), childJob+"="+string(text))
}

// inChild has a process of its own do the job, and reads its result.
func inChild(ctx context.Context, j job, result any) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, exe)
	cmd.Env = j.environment()
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("%w: %s", err, errs.String())
	}
	return json.Unmarshal(out, result)
}
