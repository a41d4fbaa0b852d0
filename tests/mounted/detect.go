// Detects a tracefs in the order in which cilium/ebpf looks for one: by mountinfo, then by statfs(2).
package main

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"syscall"
)

// The first mount of a file system in the table of mounts.
func mounted(fstype string) string {
	table, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return err.Error()
	}
	defer table.Close()
	for lines := bufio.NewScanner(table); lines.Scan(); {
		before, after, _ := strings.Cut(lines.Text(), " - ")
		if strings.HasPrefix(after, fstype+" ") {
			return strings.Fields(before)[4]
		}
	}
	return "none"
}

func main() {
	fmt.Println(mounted("tracefs"), mounted("debugfs"))
	for _, place := range []string{"/sys/kernel/tracing", "/sys/kernel/debug/tracing"} {
		var fs syscall.Statfs_t
		if err := syscall.Statfs(place, &fs); err != nil || fs.Type != 0x74726163 {
			fmt.Println(place, "is no tracefs", err)
			os.Exit(1)
		}
		// A probe, as the library makes one where perf_event_open(2) has no kprobes.
		probes, err := os.OpenFile(place+"/kprobe_events", os.O_APPEND|os.O_WRONLY, 0666)
		if err == nil {
			_, err = probes.WriteString("p:ebpf/" + fmt.Sprint("at", len(place)) + " vfs_mkdir")
			probes.Close()
		}
		id, _ := os.ReadFile(place + "/events/ebpf/" + fmt.Sprint("at", len(place)) + "/id")
		fmt.Println(place, err, len(id) > 1)
	}
}
