"""The states of a mount: serving, busy, panicked, hung or stale. `status` finds the state in time, whatever
the mount does.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, NoReturn

import pytest

from kprobefs.cli import control
from kprobefs.common import mountpoints
from kprobefs.common.daemon_registry import Daemon as Record
from kprobefs.common.daemon_registry import Registration, log_path, running, runtime_directory
from kprobefs.common.errors import ExitStatus
from kprobefs.common.mountpoints import MountState
from tests.fuse.harness import (
    PATIENCE,
    PROGRAM,
    Daemon,
    daemon,
    environment,
    eventually,
    is_alive,
    is_mounted,
    kill_with_children,
    kprobefs,
    needs_fuse,
)

pytestmark = [needs_fuse, pytest.mark.mounted]


@contextmanager
def stopped(running: Daemon) -> Iterator[None]:
    """Stop the daemon with SIGSTOP for the duration of the block."""
    running.process.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{running.process.pid}/stat")
    eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    try:
        yield
    finally:
        running.process.send_signal(signal.SIGCONT)


def condition(directory: Path) -> str:
    """Return the condition of the mount `directory` that `status --json` prints.

    Assert that the exit status agrees.
    """
    result = kprobefs("status", "--json", str(directory))
    [state] = json.loads(result.stdout)
    found = MountState(state["condition"])
    assert result.returncode == found.status
    return found.value


def test_a_stopped_daemon(mounted: Daemon) -> None:
    directory = str(mounted.directory)
    with stopped(mounted):
        assert mountpoints.condition(directory) is MountState.HUNG
        assert condition(mounted.directory) == "hung"
        # A path through a link or below the mount is refused without a lookup in the mount.
        link = mounted.directory.with_name("link")
        link.symlink_to(directory)
        mounts = [["mount", path] for path in (directory, str(link), f"{link}/scratch/x")]
        others = [["reboot", directory], ["save", "--mount", directory], ["top", directory]]
        with ThreadPoolExecutor() as at_once:
            results = list(at_once.map(lambda words: kprobefs(*words), [*mounts, *others]))
        for result in results[:2]:
            assert (result.returncode, "hangs" in result.stderr) == (ExitStatus.HUNG, True)
        assert "inside a mount" in results[2].stderr
        for result in results[3:]:
            assert result.returncode == ExitStatus.HUNG
            assert (
                f"is stopped; run kill -CONT {mounted.process.pid}, or kprobefs umount --force"
                in result.stderr
            )
        link.unlink()
        result = kprobefs("umount", directory)
        assert (result.returncode, "is stopped" in result.stderr) == (ExitStatus.HUNG, True)
        assert f"kill -CONT {mounted.process.pid}," in result.stderr
        assert is_mounted(mounted.directory)
        # Once the daemon continues, it does the unmount that was requested before.
    assert mounted.process.wait(PATIENCE) == 0


class Poll:
    """A poll object that records in `expired` the timeouts that have expired, in milliseconds."""

    expired: ClassVar[list[float]] = []

    def __init__(self) -> None:
        self._poll = select.poll()
        self.register = self._poll.register

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        found = self._poll.poll(timeout)
        if not found:
            self.expired.append(timeout)
        return found


def test_what_is_asked_in_time(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`status` queries all mounts at once, so that many hung mounts take no longer than one: less than two
    seconds.
    """
    assert mountpoints.ANSWER_TIMEOUT + mountpoints.CONTROL_TIMEOUT < 2
    # The daemon that serves may have to wait for a CPU.
    monkeypatch.setattr(mountpoints, "ANSWER_TIMEOUT", 4.0)
    monkeypatch.setattr(mountpoints, "poll", Poll)
    others = [directory, directory.with_name("b"), directory.with_name("c")]
    for other in others[1:]:
        other.mkdir()
    with daemon(others[0]) as one, daemon(others[1]) as two, daemon(others[2]), stopped(one), stopped(two):
        Poll.expired.clear()
        found = mountpoints.conditions(map(str, others))
        assert 0 < sum(Poll.expired) <= 1000 * mountpoints.ANSWER_TIMEOUT
    assert list(found.values()) == [MountState.HUNG, MountState.HUNG, MountState.SERVING]


BUSY = """
import os, sys, time
asked, answered = sys.argv[1:]
print("ready", flush=True)
while not os.path.exists(asked):
    pass
end = time.thread_time() + 0.3
while time.thread_time() < end:
    pass
open(answered, "w").close()
while True:
    pass
"""
"""Program that uses the CPU, and needs 0.3 s of it for its answer."""


def test_a_daemon_that_waits_for_a_cpu_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, asked, answered = mountpoints._ask, tmp_path / "asked", tmp_path / "answered"

    def late(directory: str, writer: int) -> NoReturn:
        asked.touch()
        while not answered.exists():
            time.sleep(0.005)
        ask(directory, writer)

    monkeypatch.setattr(mountpoints, "ANSWER_TIMEOUT", 0.05)
    monkeypatch.setattr(mountpoints, "_ask", late)
    words = [sys.executable, "-c", BUSY, str(asked), str(answered)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as busy:
        assert busy.stdout is not None
        assert busy.stdout.readline() == b"ready\n"
        registration = Registration(Record(busy.pid, str(tmp_path), "x86_64", "full", "0", "now"))
        try:
            assert mountpoints.condition(str(tmp_path)) in (MountState.SERVING, MountState.BUSY)
        finally:
            registration.close()
            busy.kill()


def test_a_question_that_waits_for_a_cpu_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = mountpoints._ask

    def late(directory: str, writer: int) -> NoReturn:
        end = time.thread_time() + 0.3
        while time.thread_time() < end:
            pass
        ask(directory, writer)

    monkeypatch.setattr(mountpoints, "ANSWER_TIMEOUT", 0.05)
    monkeypatch.setattr(mountpoints, "_ask", late)
    assert mountpoints.condition(str(tmp_path)) in (MountState.SERVING, MountState.BUSY)


def test_a_stopped_daemon_is_killed_by_force(mounted: Daemon) -> None:
    with stopped(mounted):
        assert kprobefs("umount", "--force", str(mounted.directory)).returncode == 0
        # The daemon has ended by then, but its parent may not have waited for it.
        assert Path(f"/proc/{mounted.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        assert mounted.process.wait(PATIENCE) == -signal.SIGKILL
    assert not is_mounted(mounted.directory)


def test_a_stopped_daemon_that_nobody_knows(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemon(directory) as running, stopped(running):
        monkeypatch.setenv("KPROBEFS_RUNTIME_DIRECTORY", str(tmp_path / "another"))
        result = kprobefs("umount", str(directory))
        assert (result.returncode, is_mounted(directory)) == (ExitStatus.HUNG, False)
        assert "unmounted, but its daemon hangs" in result.stderr


def test_a_kernel_that_is_at_something(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a write holds the control lock, the mount is busy. Afterwards, the mount is serving."""
    holding = tmp_path / "holding"
    holding.touch()
    monkeypatch.setenv("KPROBEFS_TEST_HOLDING", str(holding))
    with daemon(directory, "--seed", "669") as running:
        eventually(lambda: condition(directory) == "serving")
        writer = threading.Thread(target=Path(running.path("kprobes/optimization")).write_text, args=("0",))
        writer.start()
        try:
            eventually(lambda: mountpoints.condition(str(directory)) is MountState.BUSY)
            # The mount is not serving as long as the lock is held.
            assert mountpoints.condition(str(directory)) is not MountState.SERVING
        finally:
            holding.unlink()
            writer.join()
        eventually(lambda: condition(directory) == "serving")


def test_a_kernel_that_has_panicked(directory: Path) -> None:
    with daemon(directory, "--seed", "670"):
        assert condition(directory) == "panicked"
        assert kprobefs("umount", str(directory)).returncode == 0


def test_bind_mounts_are_shown_once(mounted: Daemon) -> None:
    if os.geteuid() != 0:
        pytest.skip("a bind mount needs root")
    other = mounted.directory.with_name("other")
    other.mkdir()
    script = 'mount --bind "$D/tracing" "$O"; "$@" status --json; "$@" status "$O"'
    result = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", *PROGRAM],
        env={**environment(), "D": str(mounted.directory), "O": str(other)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert result.stdout.count(str(mounted.directory)) >= 1
    assert f'"{other}"' not in result.stdout
    assert result.stdout.splitlines()[-1] == f"serving {other}"


def test_the_state_is_in_no_listing(mounted: Daemon) -> None:
    assert mountpoints.STATE_LINK not in os.listdir(mounted.directory)
    assert os.readlink(mounted.directory / mountpoints.STATE_LINK) == "serving"


def test_a_stale_mount(directory: Path) -> None:
    with daemon(directory) as killed:
        kill_with_children(killed.process.pid)
        assert killed.process.wait(PATIENCE) == -signal.SIGKILL
        assert condition(directory) == "stale"
        assert kprobefs("status").returncode >= ExitStatus.STALE
        assert kprobefs("umount", "--stale", str(directory)).returncode == 0
        assert not is_mounted(directory)


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("is_named", [True, False])
def test_a_mount_that_ends_around_the_question_is_gone(
    is_named: bool, is_before: bool, mounted: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = str(mounted.directory)
    conditions = mountpoints.conditions
    asked = []

    def conditions_as_it_ends(directories: Iterable[str]) -> dict[str, MountState]:
        asked.extend(directories)
        if is_before:
            assert mounted.stop(signal.SIGTERM) == 0
        found = conditions(asked)
        if not is_before:
            assert mounted.stop(signal.SIGTERM) == 0
        return found

    monkeypatch.setattr(mountpoints, "conditions", conditions_as_it_ends)
    listed = control.states(directory if is_named else None)
    assert directory in asked
    assert directory not in [state.directory for state in listed]


@pytest.mark.parametrize("how", [(), ("--stale",)])
def test_a_stale_one_that_is_unmounted_leaves_nothing(how: tuple[str, ...], directory: Path) -> None:
    assert kprobefs("mount", str(directory)).returncode == 0
    found = running(str(directory))
    assert found is not None
    kill_with_children(found.pid)
    eventually(lambda: condition(directory) == "stale")
    os.utime(log_path(str(directory)), (1, 1))
    assert kprobefs("umount", *how, str(directory)).returncode == 0
    assert [*runtime_directory().iterdir()] == []


def test_only_what_is_stale_and_ours_goes(mounted: Daemon, tmp_path: Path) -> None:
    assert kprobefs("umount", "--stale", str(mounted.directory)).returncode == 0
    assert is_mounted(mounted.directory)
    assert kprobefs("umount", "--stale", str(tmp_path)).returncode == 0


def test_a_foreign_mount_stays(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    script = """
        mount -t tmpfs data "$1" && echo kept > "$1/file"
        shift; for how in "--stale" "" "--force"; do "$@" umount $how "$D"; done
        cat "$D/file"
    """
    result = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", str(tmp_path), *PROGRAM],
        env={**environment(), "D": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert result.stdout == "kept\n"


def test_links_and_missing_names_are_resolved_alike(mounted: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = mounted.directory.parent
    (parent / "a").mkdir()
    (parent / "a" / "up").symlink_to("../mnt")
    (parent / "loop").symlink_to("loop")
    monkeypatch.chdir(parent)
    directory = str(mounted.directory)
    for path in ("a/up", "./a//up/", "mnt", "none/../mnt", f"{directory}/../mnt", "a/up/../mnt"):
        assert mountpoints.resolve(path) == directory, path
    assert mountpoints.resolve("a/up/tracing") == f"{directory}/tracing"
    assert mountpoints.resolve("none/x") == f"{parent}/none/x"
    with pytest.raises(Exception, match="Too many levels"):
        mountpoints.resolve("loop")
    assert kprobefs("umount", f"{parent}/a/up").returncode == 0
    assert mounted.process.wait(PATIENCE) == 0


@pytest.mark.parametrize("count", [1, 2])
def test_daemons_whose_namespace_is_left_by_all_others_end(count: int, directory: Path) -> None:
    """A daemon ends when its mount namespace has no other process except daemons."""
    if os.geteuid() != 0:
        pytest.skip("a mount namespace needs root")
    mounts = " && ".join(f'"$@" mount --mkdir "$D/{number}"' for number in range(count))
    # Another test's mount may be stale.
    script = f'mount -t tmpfs none "$D" && {mounts} && {{ "$@" status --json || true; }}'
    result = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", *PROGRAM],
        env={**environment(), "D": str(directory), "KPROBEFS_TEST_INTERVAL": "0.2"},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    states = json.loads(result.stdout)
    pids = [state["daemon"]["pid"] for state in states if state["directory"].startswith(f"{directory}/")]
    assert len(pids) == count
    eventually(lambda: not any(map(is_alive, pids)), "a daemon is still there")
