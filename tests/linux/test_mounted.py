"""A distribution's kernel behind a real mount: a script works as on the machine that runs it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.fuse.harness import REAL_PROGRAM, daemon, needs_fuse
from tests.linux import debian_kernel

pytestmark = [needs_fuse, pytest.mark.mounted]

SCRIPT = r"""
set -e
cd "$1"
echo 'p:opened do_sys_openat2' > kprobe_events
(echo 'p:wrong no_such_function' >> kprobe_events) 2> /dev/null && exit 1
grep -c 'Invalid probed address or symbol' tracing/error_log
echo 1 > tracing/events/kprobes/enable
awk '{ print $2, $3 }' kprobes/list
echo hello > scratch/file
cat scratch/file
echo 0 > tracing/events/kprobes/enable
grep -c 'cat-[0-9]* .*opened: (do_sys_openat2+0x0' tracing/trace > scratch/count
test "$(cat scratch/count)" -gt 0
mkdir tracing/instances/mine
test -f tracing/instances/mine/trace
rmdir tracing/instances/mine
echo 1 > tracing/events/sched/sched_process_fork/enable
timeout 20 cat tracing/trace_pipe > ../piped &
reader=$!
for number in 1 2 3; do (true); cat machine/version > /dev/null; done
until grep -q 'comm=sh pid=[0-9]* child_comm=sh' ../piped; do cat kprobe_profile > /dev/null; done
kill $reader
echo 0 > tracing/events/enable
echo > kprobe_events
grep -c 'Linux version' machine/dmesg
"""


def test_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KPROBEFS_RUNTIME_DIRECTORY", str(tmp_path / "runtime"))
    directory = tmp_path / "mnt"
    directory.mkdir()
    options = ("--image", str(debian_kernel.image()), "--engine", "native")
    with daemon(directory, *options, program=REAL_PROGRAM) as mounted:
        done = subprocess.run(
            ["sh", "-c", SCRIPT, "sh", str(directory)],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines() == ["1", "k do_sys_openat2+0x0", "hello", "1"]
        assert mounted.log.count("\n") <= 2
