"""After a daemon is killed, its watcher process unmounts only the mounts of this daemon, and no process or
file is left.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kprobefs.common.daemon_registry import running, runtime_directory
from kprobefs.common.mountpoints import FSTYPE, mount_points
from tests.fuse.harness import (
    PATIENCE,
    PROGRAM,
    REAL_PROGRAM,
    WATCHDOG,
    Daemon,
    daemon,
    environment,
    eventually,
    is_alive,
    is_mounted,
    kprobefs,
    needs_fuse,
)
from tests.fuse.ordinary_user import ordinary_user

pytestmark = [needs_fuse, pytest.mark.mounted]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a mount of another file system needs root")
DEADLY = [
    signal.SIGKILL,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGALRM,
    signal.SIGXCPU,
    signal.SIGSEGV,
    signal.SIGRTMIN + 3,
]


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("number", DEADLY, ids=str)
def test_nothing_is_left_of_a_daemon_that_any_signal_ends(number: int, directory: Path) -> None:
    assert kprobefs("mount", str(directory)).returncode == 0
    found = running(str(directory))
    assert found is not None
    below = children(found.pid)
    os.kill(found.pid, number)
    eventually(lambda: not is_mounted(directory), "its mount is still there")
    eventually(lambda: [*runtime_directory().iterdir()] == [], "its record or log is still there")
    eventually(lambda: not any(map(is_alive, below)), "a process is still there")
    assert os.listdir(directory) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_daemon_that_ends_by_itself_leaves_no_process(number: signal.Signals, mounted: Daemon) -> None:
    below = children(mounted.process.pid)
    assert below
    assert mounted.stop(number) == 0
    assert not any(map(is_alive, below))


def test_killing_the_whole_process_group_leaves_nothing(directory: Path) -> None:
    process = subprocess.Popen(
        [*PROGRAM, "mount", "-f", str(directory)],
        env=environment(),
        process_group=0,
        stderr=subprocess.DEVNULL,
    )
    try:
        # On a busy host, a start takes longer than PATIENCE.
        eventually(
            lambda: is_mounted(directory) and len(os.listdir(directory)) > 1,
            "it has not mounted",
            patience=WATCHDOG,
        )
        # The watcher leaves the group soon after the mount.
        eventually(lambda: any(os.getpgid(each) != process.pid for each in children(process.pid)))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(WATCHDOG)
    eventually(lambda: not is_mounted(directory), "its mount is still there", patience=WATCHDOG)


class TestRunKilled:
    """If `run` and its daemon are killed, in any order, neither processes nor directories are left."""

    def test_both_at_once(self) -> None:
        with self._running() as (process, daemon_pid, directory):
            # A stopped process cannot clean up between the two signals.
            process.send_signal(signal.SIGSTOP)
            process.kill()
            os.kill(daemon_pid, signal.SIGKILL)
            self._await_end(process, directory)

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    def test_the_daemon_before(self, number: int) -> None:
        with self._running() as (process, daemon_pid, directory):
            os.kill(daemon_pid, number)
            eventually(lambda: not is_alive(daemon_pid) and not is_mounted(directory))
            process.kill()
            self._await_end(process, directory)

    def test_run_before(self) -> None:
        with self._running() as (process, daemon_pid, directory):
            os.kill(daemon_pid, signal.SIGSTOP)
            process.kill()
            process.wait(PATIENCE)
            os.kill(daemon_pid, signal.SIGKILL)
            self._await_end(process, directory)

    @contextmanager
    def _running(self) -> Iterator[tuple[subprocess.Popen[str], int, Path]]:
        """Yield the process of `run`, the pid of its daemon and the mount."""
        process = subprocess.Popen(
            [*PROGRAM, "run", "--", "sh", "-c", "echo $KPROBEFS; exec sleep 60"],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout is not None
            directory = Path(process.stdout.readline().strip())
            found = running(str(directory))
            assert found is not None
            try:
                yield process, found.pid, directory
            finally:
                process.kill()

    def _await_end(self, process: subprocess.Popen[str], directory: Path) -> None:
        process.wait(PATIENCE)
        eventually(lambda: not directory.parent.exists(), "its directory is still there")


@needs_root
def test_bind_mounts_of_a_killed_daemon_go_too(directory: Path) -> None:
    other = directory.with_name("other")
    other.mkdir()
    with daemon(directory) as killed:
        subprocess.run(["mount", "--bind", killed.path("tracing"), str(other)], timeout=PATIENCE, check=True)
        killed.stop(signal.SIGKILL)
        eventually(lambda: not is_mounted(directory) and not is_mounted(other))


@needs_root
def test_a_mount_over_the_one_of_a_killed_daemon_stays(directory: Path) -> None:
    with daemon(directory) as killed:
        subprocess.run(["mount", "-t", "tmpfs", "data", str(directory)], timeout=PATIENCE, check=True)
        try:
            (directory / "file").write_text("kept")
            below = children(killed.process.pid)
            killed.stop(signal.SIGKILL)
            eventually(lambda: not any(map(is_alive, below)))
            assert (directory / "file").read_text() == "kept"
        finally:
            subprocess.run(["umount", str(directory)], timeout=PATIENCE, check=True)
        assert kprobefs("umount", str(directory)).returncode == 0


@needs_root
def test_another_daemon_on_the_same_directory_stays(directory: Path) -> None:
    with daemon(directory) as killed:
        watcher = children(killed.process.pid)[0]
        os.kill(watcher, signal.SIGSTOP)
        killed.stop(signal.SIGKILL)
        with daemon(directory) as other:
            os.kill(watcher, signal.SIGCONT)
            eventually(lambda: not is_alive(watcher))
            assert "tracing" in os.listdir(other.directory)
            [point] = [each for each in mount_points() if each.directory == str(directory)]
            assert running(str(directory)) is not None
    assert not is_mounted(directory)
    assert point.fstype == FSTYPE


@contextmanager
def with_late_watcher(directory: Path) -> Iterator[None]:
    """Kill a daemon of `directory`, and let its watcher process wait for a CPU during the block."""
    assert kprobefs("mount", str(directory)).returncode == 0
    found = running(str(directory))
    assert found is not None
    [watcher] = children(found.pid)
    os.kill(watcher, signal.SIGSTOP)
    try:
        os.kill(found.pid, signal.SIGKILL)
        eventually(lambda: not is_alive(found.pid))
        yield
    finally:
        os.kill(watcher, signal.SIGCONT)
    eventually(lambda: not is_alive(watcher))


def test_a_late_watcher_leaves_the_log_of_the_next_daemon(directory: Path) -> None:
    with with_late_watcher(directory):
        assert kprobefs("mount", str(directory)).returncode == 0
    assert running(str(directory)) is not None
    assert sorted(path.suffix for path in runtime_directory().iterdir()) == [".json", ".log"]
    assert kprobefs("umount", str(directory)).returncode == 0


def test_a_late_watcher_creates_no_runtime_directory(directory: Path) -> None:
    removed = runtime_directory().parent
    with with_late_watcher(directory):
        shutil.rmtree(removed)
    assert not removed.exists()
    assert not is_mounted(directory)


def test_an_ordinary_users_daemon_leaves_nothing() -> None:
    with ordinary_user() as user:
        user.run("mkdir", "m")
        mounted = user.kprobefs("mount", "m")
        assert mounted.returncode == 0, mounted.stderr
        [state] = json.loads(user.kprobefs("status", "--json").stdout)
        assert user.run("kill", "-USR1", str(state["daemon"]["pid"])).returncode == 0
        eventually(lambda: FSTYPE not in user.run("cat", "/proc/mounts").stdout)
        assert user.run("ls", "m").returncode == 0


class TestAutomount:
    """Mounts by an automounter, which lets only its own process group access the directory until the mount is
    there.
    """

    @pytest.mark.parametrize("options", [(), ("--mkdir",), ("--arch", "riscv64")], ids=str)
    def test_mount(self, options: tuple[str, ...], directory: Path) -> None:
        found = self._automounted(directory, *PROGRAM, "mount", *options, str(directory))
        assert found[0] == "0"
        assert {"kprobe_events", "kprobes", "tracing"} <= set(found)

    def test_the_helper_of_mount_8(self, directory: Path) -> None:
        script = "import sys; from kprobefs.cli.mount_helper import main; sys.exit(main())"
        program = [sys.executable, "-c", script]
        found = self._automounted(directory, *program, "debugfs", str(directory), "-o", "rw,nofail")
        assert found[0] == "0"
        assert "tracing" in found

    def test_a_mount_that_fails_is_told_to_those_who_wait(self, directory: Path) -> None:
        command = [*REAL_PROGRAM, "mount", "--image", __file__, str(directory)]
        assert self._automounted(directory, *command) == ["2"]

    def _automounted(self, directory: Path, *command: str) -> list[str]:
        if os.geteuid() != 0:
            pytest.skip("mounting autofs needs root")
        automounter = str(Path(__file__).with_name("automounter.py"))
        done = subprocess.run(
            ["unshare", "-m", sys.executable, automounter, str(directory), *command],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
            timeout=90,
            check=False,
        )
        if done.returncode == 77:
            pytest.skip(done.stdout.strip())
        assert done.returncode == 0
        return done.stdout.split()
