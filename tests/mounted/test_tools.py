"""Programs for tracefs, unmodified, over a mount at the system's places."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import gettempdir

import pytest

from tests.fuse.harness import ROOT, needs_fuse

pytestmark = [
    pytest.mark.mounted,
    needs_fuse,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting at the system's places needs root"),
]
TIMEOUT = 60


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} isn't installed")


def as_system(script: str, home: Path, *options: str) -> str:
    """What a shell script prints whose commands see the mount where a system has its tracefs."""
    own = {"PYTHONPATH": str(ROOT), "HOME": str(home), "TMPDIR": str(home), "LC_ALL": "C"}
    result = subprocess.run(
        [sys.executable, "-m", "kprobefs", "run", "--as-system", *options, "--", "bash", "-c", script],
        env={**os.environ, **own},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


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

    def test_nothing_is_left(self, tmp_path: Path) -> None:
        def mounts() -> set[str]:
            """All but what other tests have meanwhile, below the directory for temporary files."""
            lines = Path("/proc/self/mountinfo").read_text().splitlines()
            return {line for line in lines if gettempdir() not in line or str(tmp_path) in line}

        before = mounts()
        as_system("true", tmp_path)
        assert mounts() == before


@needs("kprobe-perf")
def test_kprobe_perf(tmp_path: Path) -> None:
    """perf-tools: a probe on what the client's own opens run."""
    script = """
        kprobe-perf -F -d 1 'p:vfs_open' & sleep 0.5
        cd /sys/kernel/debug/scratch
        for name in a b c; do echo $name >$name; done
        wait
    """
    out = as_system(script, tmp_path)
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
    script = """
        tpoint-perf -l | grep sched:sched_process
        (sleep 0.3; for i in 1 2 3; do cat /sys/kernel/debug/machine/version; done) >/dev/null &
        tpoint-perf -d 1 sched:sched_process_fork; wait
    """
    out = as_system(script, tmp_path)
    assert out.startswith("sched:sched_process_exec\nsched:sched_process_exit\nsched:sched_process_fork\n")
    assert ": sched_process_fork: comm=bash pid=" in out


@needs("perf")
def test_perf_probe(tmp_path: Path) -> None:
    script = """
        perf probe --add vfs_read && perf probe -l && perf probe -d vfs_read && perf probe -l
        cat /sys/kernel/tracing/kprobe_events
    """
    out = as_system(f"({script}) 2>&1", tmp_path)
    assert "probe:vfs_read       (on vfs_read)" in out
    assert out.endswith("Removed event: probe:vfs_read\n")


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
        """It asks the host how many CPUs there are, and wants a buffer of each."""
        script = """
            cd "$HOME"
            (sleep 0.2; for i in 1 2 3; do cat /sys/kernel/debug/machine/version; done) >/dev/null &
            trace-cmd record -e sched_process_fork -o trace.dat sleep 0.6 >/dev/null
            trace-cmd report -i trace.dat
        """
        out = as_system(script, tmp_path, "--cpus", str(os.sysconf("SC_NPROCESSORS_CONF")))
        assert "sched_process_fork:   comm=bash pid=" in out

    def test_stat(self, tmp_path: Path) -> None:
        out = as_system("trace-cmd stat", tmp_path)
        assert "Tracing is enabled" in out


@needs("bpftrace")
def test_bpftrace_lists(tmp_path: Path) -> None:
    out = as_system("bpftrace -l 'kprobe:vfs_rea*'; bpftrace -l 'tracepoint:sched:*'", tmp_path)
    assert "kprobe:vfs_read\n" in out
    assert "tracepoint:sched:sched_switch\n" in out
