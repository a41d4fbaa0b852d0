"""A user's session in a shell, from mount to umount, with the real kernel."""

from __future__ import annotations

import errno
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import pytest

from kprobefs.common.errors import ExitStatus
from kprobefs.common.mountpoints import detach
from tests.fuse.harness import (
    PATIENCE,
    REAL_PROGRAM,
    Daemon,
    daemon,
    eventually,
    is_mounted,
    kill_with_children,
    kprobefs,
    needs_fuse,
    sleeps,
    waits_for_mount,
)
from tests.mounted.files import Files, assert_errno

pytestmark = [needs_fuse, pytest.mark.mounted]

HIT = re.compile(r" +(?P<comm>\S+)-(?P<pid>\d+) +\[000\] \S+ +\d+\.\d{6}: (?P<event>\w+): \((?P<place>\S+)\)")


def test_from_probe_to_disarming(files: Files) -> None:
    result = files.shell(
        """
        set -e
        echo 'p:opened do_sys_openat2 dfd=%di' > kprobe_events
        echo 1 > tracing/events/kprobes/opened/enable
        cat kprobes/list
        cat scratch/nothing 2> /dev/null || echo "as it should"
        cat tracing/trace | grep -c opened:
        cat kprobes/stats/kprobes/opened/{mode,enabled,nmissed}
        echo 0 > kprobes/enabled
        echo 0 > kprobes/stats/kprobes/opened/hits
        cat kprobes/stats/kprobes/opened/{hits,mode}
        echo 1 > kprobes/enabled
        echo 0 > tracing/events/kprobes/opened/enable
        cat kprobes/list
        > kprobe_events
        cat kprobes/list
        > tracing/trace
        tail -n 1 tracing/trace
        """
    )
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert re.fullmatch(r"[0-9a-f]{16}  k  do_sys_openat2\+0x0    \[FTRACE\]", lines[0])
    assert lines[1] == "as it should"
    assert int(lines[2]) >= 2
    assert lines[3:8] == ["ftrace", "1", "0", "0", "disarmed"]
    assert re.fullmatch(r"[0-9a-f]{16}  k  do_sys_openat2\+0x0    \[DISABLED\]\[FTRACE\]", lines[8])
    assert lines[9].startswith("#")
    assert len(lines) == 10


def test_a_fork_is_seen_as_in_a_real_trace(files: Files) -> None:
    result = files.shell(
        """
        echo p:forked kernel_clone > kprobe_events
        echo 1 > tracing/events/kprobes/forked/enable
        echo $$
        (echo from the child > /dev/null)
        cat tracing/trace
        true
        """
    )
    shell, *_ = result.stdout.splitlines()
    hits = [HIT.match(line) for line in result.stdout.splitlines() if " forked: " in line]
    ours = [hit for hit in hits if hit and hit["pid"] == shell]
    assert len(ours) == 2
    for hit in ours:
        assert hit["comm"] == "bash"
        assert hit["place"].startswith("kernel_clone+0x0/0x")


def test_mount_and_umount_from_the_shell(directory: Path) -> None:
    mounted = kprobefs("mount", str(directory), program=REAL_PROGRAM)
    assert (mounted.returncode, mounted.stdout, mounted.stderr) == (0, "", "")
    assert Files(directory).read("machine/version").startswith("Linux version 6.1.")
    assert str(directory) in kprobefs("status", program=REAL_PROGRAM).stdout
    assert kprobefs("umount", str(directory), program=REAL_PROGRAM).returncode == 0
    assert not is_mounted(directory)


def test_a_new_mount_over_a_dead_one(directory: Path) -> None:
    with daemon(directory, program=REAL_PROGRAM) as first:
        kill_with_children(first.process.pid)
        first.process.wait(PATIENCE)
        with assert_errno(errno.ENOTCONN):
            os.listdir(directory)
        with daemon(directory, program=REAL_PROGRAM):
            assert Files(directory).read("kprobes/enabled") == "1\n"


def test_a_new_mount_while_the_daemon_of_an_unmounted_one_ends(directory: Path) -> None:
    """After umount(8), the next mount waits for the end of the old daemon, which may be without a CPU."""
    with daemon(directory, program=REAL_PROGRAM) as old:
        pid = old.process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            detach(str(directory))
            with ThreadPoolExecutor(1) as thread:
                new = thread.submit(kprobefs, "mount", str(directory), program=REAL_PROGRAM)
                # Without a wait, the start is refused in this time.
                assert wait([new], timeout=1).not_done
                os.kill(pid, signal.SIGCONT)
                assert (new.result().returncode, new.result().stderr) == (0, "")
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        assert old.process.wait(PATIENCE) == 0
        assert Files(directory).read("kprobes/enabled") == "1\n"
        assert kprobefs("umount", str(directory), program=REAL_PROGRAM).returncode == 0


def test_layout_tracefs(directory: Path) -> None:
    with daemon(directory, "--layout", "tracefs", program=REAL_PROGRAM):
        files = Files(directory)
        assert not {"machine", "scratch", "kprobes"} & set(os.listdir(directory))
        mounts = Path("/proc/mounts").read_text().splitlines()
        assert any(line.startswith(f"tracefs {directory} fuse.kprobefs ") for line in mounts)
        files.write("kprobe_events", "p:a vfs_read")
        files.write("events/kprobes/a/enable", "1")
        assert files.read("events/enable") == "X\n"
        assert " a: (vfs_read+0x0/" in files.read("trace")


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["true"], 0),
        (["sh", "-c", "grep -q Linux $KPROBEFS/machine/version && exit 7"], 7),
        (["sh", "-c", "echo p:a nosuch > $KPROBEFS/kprobe_events"], 2),
        (["sh", "-c", "kill -TERM $$"], 128 + signal.SIGTERM),
        (["/nonexistent"], ExitStatus.NOT_FOUND),
    ],
)
def test_run_passes_the_exit_status_on(command: list[str], status: int) -> None:
    if status == 2:
        # dash exits with 1 or 2 when a builtin's write fails, by version.
        assert kprobefs("run", "--", *command, program=REAL_PROGRAM).returncode in (1, 2)
    else:
        assert kprobefs("run", "--", *command, program=REAL_PROGRAM).returncode == status


def test_an_idle_daemon_sleeps(mounted: Daemon, files: Files) -> None:
    files.probe("p:a vfs_read")
    files.read("kprobes/list")
    # The host tells the daemon later that the file was closed.
    eventually(lambda: sleeps(mounted.process.pid), interval=0.1)
    before = mounted.cpu_seconds
    signal.sigtimedwait([], 0.5)
    assert mounted.cpu_seconds - before < 0.02


def test_sigterm_under_blocked_readers(mounted: Daemon, files: Files) -> None:
    descriptor = os.open(files.path("tracing/trace_pipe"), os.O_RDONLY)
    pid = os.fork()
    if pid == 0:
        try:
            os.read(descriptor, 100)
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    eventually(lambda: waits_for_mount(pid))
    os.close(descriptor)
    assert mounted.stop(signal.SIGTERM) == 0
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in (errno.EIO, errno.ECONNABORTED)
