// Probes a function and listens to an event until both have been seen, as the library's example does.
package main

import (
	"fmt"
	"os"
	"os/exec"

	"github.com/evilsocket/ftrace"
)

func main() {
	probe := ftrace.NewProbe("seen", "vfs_mkdir", []string{"sched/sched_process_exit"})
	probe.Reset()
	if err := probe.Enable(); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	exec.Command("mkdir", os.Args[1]).Run()
	made, ended := false, false
	for event := range probe.Events() {
		made = made || event.IsSyscall && event.Name == "vfs_mkdir"
		ended = ended || event.Name == "sched_process_exit"
		if made && ended {
			break
		}
	}
	// The library sends to its channel while it is disabled.
	go func() {
		for range probe.Events() {
		}
	}()
	fmt.Println(made, ended, probe.Disable())
}
