"""Unmodified programs for tracefs, with a mount at the system's places of tracefs and debugfs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from tempfile import gettempdir

import pytest

from stress.clients import AWAIT_RECORDERS
from tests.fuse.harness import needs_fuse
from tests.mounted.system import as_system, while_sleeping

PYTHON = shlex.quote(sys.executable)

pytestmark = [
    pytest.mark.mounted,
    needs_fuse,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting at the system's places needs root"),
]


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} isn't installed")


class TestPlaces:
    def test_the_mount_is_where_the_system_has_its_own(self, tmp_path: Path) -> None:
        script = """
            echo p:foo vfs_read > /sys/kernel/tracing/kprobe_events
            cat /sys/kernel/debug/tracing/kprobe_events
            test -r /sys/kernel/debug/kprobes/list
            grep ' vfs_read$' /proc/kallsyms | cut -d ' ' -f 2-
            cmp /proc/version <(head -n 1 "$KPROBEFS"/machine/version) && echo same
        """
        assert as_system(script, tmp_path) == "p:kprobes/foo vfs_read\nT vfs_read\nsame\n"

    def test_the_stack_tracer_has_its_switch(self, tmp_path: Path) -> None:
        script = """
            cd /proc/sys/kernel && test -r pid_max
            cat stack_tracer_enabled && echo 1 > stack_tracer_enabled
            grep -c ' 0)' /sys/kernel/tracing/stack_trace
        """
        assert as_system(script, tmp_path) == "0\n1\n"

    def test_the_optimizer_has_its_switch(self, tmp_path: Path) -> None:
        script = """
            cd /proc/sys/debug && ls -A | grep -cx kprobes-optimization
            cat kprobes-optimization && echo 0 > kprobes-optimization
            cat "$KPROBEFS"/kprobes/optimization
        """
        assert as_system(script, tmp_path) == "1\n1\n0\n"

    def test_nothing_is_left(self, tmp_path: Path) -> None:
        def mounts() -> set[str]:
            """Return the lines of mountinfo, except those of mounts that tests running in parallel made below
            the temporary directory.
            """
            lines = Path("/proc/self/mountinfo").read_text().splitlines()
            return {line for line in lines if gettempdir() not in line or str(tmp_path) in line}

        before = mounts()
        as_system("true", tmp_path)
        assert mounts() == before


@needs("kprobe-perf")
def test_kprobe_perf(tmp_path: Path) -> None:
    """`kprobe` of perf-tools prints the hits of vfs_open that a client's open(2) causes."""
    work = while_sleeping("echo a > /sys/kernel/debug/scratch/a", tmp_path)
    out = as_system(f"{work} kprobe-perf -F -d 1 'p:vfs_open'", tmp_path)
    assert "Tracing kprobe vfs_open for 1 seconds (buffered)..." in out
    assert ": vfs_open: (vfs_open+0x0/0x" in out
    assert out.endswith("Ending tracing...\n")


@needs("kprobe-perf")
def test_kprobe_perf_prints_the_format(tmp_path: Path) -> None:
    out = as_system("kprobe-perf -F -v 'p:myopen vfs_open file=%si:x64' || test $? = 1", tmp_path)
    assert "name: myopen" in out
    assert "field:u64 file;\toffset:16;\tsize:8;\tsigned:0;" in out


@needs("tpoint-perf")
def test_tpoint_perf(tmp_path: Path) -> None:
    # The first read makes the shell a client, whose forks the trace shows.
    work = (
        "read -r line < /sys/kernel/debug/machine/version; cat /sys/kernel/debug/machine/version > /dev/null"
    )
    script = f"""
        {while_sleeping(work, tmp_path)}
        tpoint-perf -l | grep sched:sched_process
        tpoint-perf -d 1 sched:sched_process_fork
    """
    out = as_system(script, tmp_path)
    assert out.startswith("sched:sched_process_exec\nsched:sched_process_exit\nsched:sched_process_fork\n")
    assert ": sched_process_fork: comm=sleep pid=" in out


@needs("perf")
def test_perf_probe(tmp_path: Path) -> None:
    script = """
        perf probe --add vfs_read && perf probe -l && perf probe -d vfs_read && perf probe -l
        cat /sys/kernel/tracing/kprobe_events
    """
    out = as_system(f"({script}) 2>&1", tmp_path)
    assert "probe:vfs_read       (on vfs_read)" in out
    assert out.endswith("Removed event: probe:vfs_read\n")


@needs("perf")
def test_perf_list(tmp_path: Path) -> None:
    """perf lists all events that have a file `id`. perf sees only the types of directory entries, and calls
    no stat(2).
    """
    script = """
        perf list 'sched:*'; echo =; perf list tracepoint; echo =
        cd /sys/kernel/tracing/events; ls -d */*/id
    """
    some, every, there = as_system(script, tmp_path).split("=\n")
    events = {path.removesuffix("/id").replace("/", ":") for path in there.split()}
    assert set(re.findall(r"^ *(\w+:\w+) +\[Tracepoint event\]$", every, re.M)) == events
    listed = set(re.findall(r"^ *(\w+:\w+) +\[Tracepoint event\]$", some, re.M))
    assert listed == {event for event in events if event.startswith("sched:")}


@needs("trace-cmd")
@pytest.mark.skipif(shutil.which("cc") is None, reason="libtracefs is helped by a library built with cc")
class TestTraceCmd:
    def test_start_show_stop_reset(self, tmp_path: Path) -> None:
        script = """
            cd /sys/kernel/tracing
            echo 'p:kprobes/foo vfs_open' > kprobe_events
            trace-cmd list -e kprobes
            trace-cmd start -e kprobes:foo && cat events/kprobes/foo/enable
            echo a > /sys/kernel/debug/scratch/y
            trace-cmd stop && cat tracing_on
            trace-cmd show | grep -c ': foo: (vfs_open+0x0/0x'
            trace-cmd reset && cat tracing_on
        """
        lines = as_system(script, tmp_path).split("\n")
        assert lines[:3] == ["kprobes:foo", "1", "0"]
        assert int(lines[3]) > 1
        assert lines[4:] == ["1", ""]

    def test_record_and_report(self, tmp_path: Path) -> None:
        """trace-cmd records and reports a fork.

        The mount has as many CPUs as the host, because trace-cmd reads the host's number of CPUs and needs a
        buffer for each CPU.
        """
        script = f"""
            cd "$HOME"
            cat >command <<'END'
{AWAIT_RECORDERS}
await_recorders
# The first read makes the shell a client, whose forks the trace shows.
read -r line < /sys/kernel/debug/machine/version
cat /sys/kernel/debug/machine/version
END
            trace-cmd record -e sched_process_fork -o trace.dat bash command >/dev/null
            trace-cmd report -i trace.dat
        """
        out = as_system(script, tmp_path, "--cpus", str(os.sysconf("SC_NPROCESSORS_CONF")))
        assert "sched_process_fork:   comm=bash pid=" in out

    CPUS = str(os.sysconf("SC_NPROCESSORS_CONF"))
    """Number of CPUs of the mount: that of the host, for each CPU of which trace-cmd needs a buffer."""
    PROBE = """
        cd "$HOME"
        touch /sys/kernel/debug/scratch/many
        printf 'p:foo vfs_open a=$arg1 b=$arg2 c=$arg3 d=$arg4' > /sys/kernel/tracing/kprobe_events
        cat >load <<'END'
import pathlib, re, sys, time
def unread():
    stats = pathlib.Path("/sys/kernel/tracing/per_cpu").glob("cpu*/stats")
    return max(int(re.search("entries: (\\d+)", each.read_text())[1]) for each in stats)
for number in range(int(sys.argv[1])):
    while number % 50 == 0 and unread() > 400:
        time.sleep(0.01)
    open("/sys/kernel/debug/scratch/many").close()
    time.sleep(0.002)
END
    """
    """Script that defines a probe, and writes a program `load` whose argument is the number of hits.

    A buffer of 32 KiB has space for about 600 records, and trace-cmd reads it when it is half full. On a busy
    host, trace-cmd may read late, so the program waits while a buffer has 400 records.
    """

    def test_record_into_small_buffers_loses_nothing(self, tmp_path: Path) -> None:
        """trace-cmd records 1000 hits of 52 bytes each through buffers of 32 KiB, without a loss."""
        script = f"""{self.PROBE}
            timeout 80 trace-cmd record -b 32 -e foo -o trace.dat {PYTHON} load 1000 >/dev/null
            trace-cmd report -i trace.dat >report
            grep -c foo: report; grep -ci lost report || :
        """
        recorded, lost = as_system(script, tmp_path, "--cpus", self.CPUS).split()
        assert int(recorded) >= 1000
        assert int(lost) == 0

    def test_stream_shows_events_while_they_come(self, tmp_path: Path) -> None:
        script = f"""{self.PROBE}
            # Otherwise, trace-cmd ends recorders by SIGUSR2 if they have not begun after half a second.
            trap '' USR2
            timeout -k 1 80 trace-cmd stream -b 32 -e foo >stream &
            cd /sys/kernel/tracing
            until [ "$(cat events/kprobes/foo/enable tracing_on)" = $'1\\n1' ]; do sleep 0.1; done
            cd "$HOME"
            for more in 1 2; do
                before=$(grep -c foo: stream)
                until [ "$(grep -c foo: stream)" -gt $((before + 100)) ]; do {PYTHON} load 100; done
                echo more
            done
            kill -INT %1; wait
            grep -ci lost stream || :
        """
        assert as_system(script, tmp_path, "--cpus", self.CPUS) == "more\nmore\n0\n"

    def test_profile_ends(self, tmp_path: Path) -> None:
        """`trace-cmd profile` ends, and reports system calls.

        trace-cmd's recorders wake when half of a buffer is full. Records that the recorders pass on after the
        end of the command are lost, because trace-cmd then reads the pipes without waiting. So the command
        ends when trace-cmd waits for the recorders, and the recorders wait for records.
        """
        script = f"""{self.PROBE}
            cat >command <<'END'
{AWAIT_RECORDERS}
{PYTHON} load 50
until grep -q '^read events: [1-9]' /sys/kernel/tracing/per_cpu/cpu*/stats; do sleep 0.1; done
await_recorders
until grep -q poll /proc/$PPID/wchan; do sleep 0.02; done
END
            timeout 80 trace-cmd profile -p nop -b 32 -e sched_switch -e raw_syscalls sh command
        """
        assert "Event: sys_enter:" in as_system(script, tmp_path, "--cpus", self.CPUS)

    def test_stat(self, tmp_path: Path) -> None:
        out = as_system("trace-cmd stat", tmp_path)
        assert "Tracing is enabled" in out


@needs("bpftrace")
def test_bpftrace_lists(tmp_path: Path) -> None:
    out = as_system("bpftrace -l 'kprobe:vfs_rea*'; bpftrace -l 'tracepoint:sched:*'", tmp_path)
    assert "kprobe:vfs_read\n" in out
    assert "tracepoint:sched:sched_switch\n" in out
