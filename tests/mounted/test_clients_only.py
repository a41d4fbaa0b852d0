"""--isolate: the same requests give the same bytes through a mount, whatever other processes do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuse.harness import REAL_PROGRAM, daemon, kprobefs, needs_fuse
from tests.mounted.files import Files
from tests.sample import fewer

pytestmark = [needs_fuse, pytest.mark.mounted]

RUNS = fewer(20, 7)
SESSION = """
    set -e
    echo 'p:opens do_sys_openat2 name=+0($arg2):ustring flags=+0($arg3):x64' > tracing/kprobe_events
    echo 'r:reads vfs_read $retval' >> tracing/kprobe_events
    echo p:body vfs_write+5 >> tracing/kprobe_events
    echo 1 > tracing/events/kprobes/enable
    echo 1 > tracing/events/sched/sched_process_fork/enable
    echo 1 > tracing/events/sched/sched_process_exit/enable
    echo 1 > tracing/events/syscalls/enable
    for n in 1 2; do
        echo $n > scratch/f$n
        cat scratch/f$n > /dev/null
        (echo forked; :)
        mkdir scratch/d$n; stat scratch/d$n > /dev/null; sleep 0.0$((RANDOM % 9))
        cat scratch/missing || :
    done
    echo 0 > tracing/tracing_on
    cat tracing/trace machine/tasks kprobes/list
"""
TIME = re.compile(rb'"ts": [\d.]+|  [\d.]+(?=: )')
"""Pattern for the time of a record in the outputs of `trace`."""
NOISE = """
import os, time
while True:
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    time.sleep(0.002)
"""

BUSY = """
import time
while True:
    end = time.monotonic() + 0.003
    while time.monotonic() < end:
        pass
    time.sleep(0.003)
"""


@pytest.fixture
def busy() -> object:
    """During the test, start and end many processes on the host, and use half of a CPU's time."""
    noise = [
        subprocess.Popen([sys.executable, "-c", NOISE]),
        subprocess.Popen([sys.executable, "-c", BUSY]),
    ]
    yield
    for process in noise:
        process.kill()
        process.wait()


@pytest.mark.usefixtures("busy")
def test_runs_are_byte_identical(directory: Path) -> None:
    shown = []
    for _ in range(RUNS):
        with daemon(directory, "--isolate", program=REAL_PROGRAM) as running:
            done = subprocess.run(
                ["bash", "-c", SESSION], cwd=running.directory, capture_output=True, timeout=50, check=True
            )
        shown.append(done.stdout)
    assert shown[0].count(b" opens: ") >= 10
    assert b"sched_process_exit: comm=cat pid=" in shown[0]
    assert shown[1:] == shown[:-1]


def test_clients_are_numbered_as_they_come(directory: Path) -> None:
    with daemon(directory, "--isolate", program=REAL_PROGRAM) as running:
        files = Files(running.directory)
        files.probe("p:made vfs_mkdir")
        files.write("tracing/events/sched/sched_process_fork/enable", "1")
        for name in "ab":
            subprocess.run(["mkdir", files.path(f"scratch/{name}")], check=True)
        subprocess.run(["true"], check=True)
        lines = files.records()
    pids = [int(re.search(r"-(\d+)", line)[1]) for line in lines if " made: " in line]  # type: ignore[index]
    assert pids == [pids[0], pids[0] + 1]
    assert 1000 < pids[0] < 1010
    forks = [line for line in lines if "sched_process_fork" in line]
    assert [int(line.rsplit("=", 1)[1]) for line in forks] == pids
    told = re.findall(r"-(\d+) +\[|pid=(\d+)", "\n".join(lines))
    # In a container, the pid of this process may be in the same range.
    assert {int(pid) for match in told for pid in match if pid} == {pids[0] - 1, *pids}


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize(
    ("output", "probes"),
    [
        ("x.trace.json", ("p:vfs_read n=$arg3", "r:vfs_read got=$retval")),
        ("x.txt", ("p:vfs_read", "p:vfs_write")),
        ("x.folded", ("--graph", "vfs_read")),
    ],
)
def test_traces_have_the_same_records(tmp_path: Path, output: str, probes: tuple[str, ...]) -> None:
    """Repeated runs of `trace --isolate` write the same records and durations.

    The process that reads the records is also a client, but is not recorded. Programs that look at all mounts
    of the host may shift the times.
    """
    (tmp_path / "file").write_text("hello\n")
    shown = []
    for _ in range(fewer(6, 3)):
        options = ("--isolate", "--clock", "model", "--seed", "1", "-o", str(tmp_path / output))
        command = ("trace", *options, *probes, "--", "cat", "file")
        done = kprobefs(*command, cwd=str(tmp_path), program=REAL_PROGRAM)
        assert done.returncode == 0, done.stderr
        shown.append(TIME.sub(b"", (tmp_path / output).read_bytes()))
    assert b"python" not in shown[0]
    assert b"vfs_read" in shown[0]
    assert shown[1:] == shown[:-1]


def test_a_kernel_of_its_own_has_its_own_pids() -> None:
    refused = kprobefs("mount", "--kprobes", "kernel", "--image", "host", "--isolate", "/nowhere")
    assert (refused.returncode, refused.stderr) == (
        2,
        "kprobefs: --isolate: not possible with a distribution's kernel; leave it out\n",
    )
