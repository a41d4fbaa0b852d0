"""HostProcesses, the watch of real processes: forks, exits and names from /proc and the process connector."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

import pytest

from emulated_kernel.guests.common import host_processes
from emulated_kernel.guests.common.fork_events import ForkEvents
from emulated_kernel.guests.common.host_processes import HostProcesses, ProcessWatch, _pids_between

LIMIT = 5.0


@pytest.fixture
def watch() -> Iterator[HostProcesses]:
    """Yield a HostProcesses that follows this process, as if it were a client."""
    watch = HostProcesses()
    watch.follow(os.getpid())
    yield watch
    watch.close()


@pytest.fixture
def few_descriptors(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostProcesses]:
    """Yield a watch that may keep no descriptor for a process."""
    monkeypatch.setattr("emulated_kernel.guests.common.host_processes._descriptor_bounds", lambda: (0, 0))
    watch = HostProcesses()
    yield watch
    watch.close()


@pytest.fixture
def events(watch: HostProcesses) -> ForkEvents:
    """Return the fork events of the watch.

    Skip the test if this process may not listen to the process connector.
    """
    if watch._fork_events is None:
        pytest.skip("nobody may listen to the process connector here")
    return watch._fork_events


@contextmanager
def child() -> Iterator[int]:
    """Yield the pid of a child that lives as long as the block."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    try:
        yield pid
    finally:
        os.close(write)
        os.waitpid(pid, 0)


@contextmanager
def thread() -> Iterator[int]:
    """Yield the id of a thread that lives as long as the block."""
    started, done = threading.Event(), threading.Event()

    def live() -> None:
        started.set()
        done.wait(LIMIT)

    running = threading.Thread(target=live)
    running.start()
    started.wait(LIMIT)
    assert running.native_id is not None
    try:
        yield running.native_id
    finally:
        done.set()
        running.join()


def wait_for_exit(watch: HostProcesses, pid: int) -> None:
    until = monotonic() + LIMIT
    while pid not in watch.exited():
        assert monotonic() < until
        sleep(0.001)


def test_a_fork_is_told_once(watch: HostProcesses) -> None:
    with child() as pid:
        (found,) = [fork for fork in watch.forks() if fork.pid == pid]
        assert (found.parent, found.alive) == (os.getpid(), True)
        assert (found.uid, found.gid) == (os.getuid(), os.getgid())
        assert found.comm == watch.comm(os.getpid())
        assert all(fork.pid != pid for fork in watch.forks())


def test_a_process_that_is_only_beginning_is_told_later(
    watch: HostProcesses, events: ForkEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new pid that is neither in /proc nor in a fork event yet is reported as a fork later,
    exactly once.
    """
    with child() as pid:
        with monkeypatch.context() as patch:
            patch.setattr(host_processes, "read", lambda _path: None)
            patch.setattr(events, "take", lambda: ({}, set()))
            assert all(fork.pid != pid for fork in watch.forks())
        (found,) = [fork for fork in watch.forks() if fork.pid == pid]
        assert (found.parent, found.alive) == (os.getpid(), True)
        assert all(fork.pid != pid for fork in watch.forks())


def test_a_pid_that_becomes_no_process_is_forgotten(
    watch: HostProcesses, events: ForkEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "take", lambda: ({}, set()))
    now = monotonic()
    monkeypatch.setattr(host_processes, "monotonic", lambda: now)
    with child() as pid:
        pass
    assert all(fork.pid != pid for fork in watch.forks())
    now += 2
    (found,) = [fork for fork in watch.forks() if fork.pid == pid]
    assert (found.parent, found.alive) == (None, False)
    assert all(fork.pid != pid for fork in watch.forks())


def test_a_zombie_is_not_alive(watch: HostProcesses) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        (found,) = [fork for fork in watch.forks() if fork.pid == pid]
        assert (found.parent, found.alive) == (os.getpid(), False)
    finally:
        os.waitpid(pid, 0)


def test_threads_are_no_processes(watch: HostProcesses) -> None:
    with thread() as started:
        told = [fork.pid for fork in watch.forks()]
    assert started not in told
    assert os.getpid() not in told


def test_followed_processes_end(watch: HostProcesses) -> None:
    with child() as followed, child() as other:
        watch.follow(followed)
        watch.follow(followed)
        assert watch.comm(followed) is not None
        assert watch.exited() == []
    wait_for_exit(watch, followed)
    assert watch.exited() == []
    assert watch.comm(followed) is None
    assert watch.comm(other) is None


def test_a_process_that_ended_before_it_was_followed(watch: HostProcesses) -> None:
    """A process that has ended before the call of follow() is reported as exited, even if no other process
    ends.
    """
    with child() as pid:
        pass
    watch.follow(pid)
    assert watch.exited() == [pid]
    assert watch.exited() == []


def test_a_thread_is_followed_as_long_as_it_lives(watch: HostProcesses) -> None:
    with thread() as followed:
        watch.follow(followed)
        assert watch.exited() == []
        assert watch.comm(followed)
    if _linux() >= (6, 9):
        wait_for_exit(watch, followed)


def _linux() -> tuple[int, int]:
    major, minor, *_ = os.uname().release.split(".")
    return int(major), int(minor)


def test_a_thread_of_an_older_kernel(watch: HostProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """If pidfd_open refuses threads (before Linux 6.9), a followed thread counts as alive as long as its
    process lives.
    """
    plain = os.pidfd_open

    def pidfd_open(pid: int, flags: int = 0) -> int:
        if flags or pid != os.getpid():
            raise OSError(errno.EINVAL, "before 6.9")
        return plain(pid)

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    with thread() as followed:
        watch.follow(followed)
        assert watch.exited() == []
    assert watch.exited() == []


def test_a_number_used_again(watch: HostProcesses) -> None:
    """If a pid is used again, the watch reads the name of the new process, and not the open file of the
    earlier process.
    """
    with child() as ended:
        assert watch.comm(ended) is not None
    stale = watch._comms[ended]
    with child() as again:
        watch._comms[again] = stale
        assert watch.comm(again) == watch.comm(os.getpid())
        watch._comms.pop(ended)


def test_a_name_of_any_bytes(watch: HostProcesses) -> None:
    comm = Path("/proc/self/comm")
    before = comm.read_bytes().removesuffix(b"\n")
    try:
        comm.write_bytes(b"\xff\xfe name")
        name = watch.comm(os.getpid())
        assert name is not None
        assert name.encode("utf-8", "surrogateescape") == b"\xff\xfe name"
    finally:
        comm.write_bytes(before)


def test_names_are_read_anew(watch: HostProcesses) -> None:
    own = os.getpid()
    comm = Path("/proc/self/comm")
    before = comm.read_text(encoding="utf-8").rstrip("\n")
    try:
        for name in ("renamed", "again"):
            comm.write_text(name, encoding="utf-8")
            if watch.has_events():
                watch.forks()
            assert watch.comm(own) == name
    finally:
        comm.write_text(before, encoding="utf-8")


@pytest.mark.usefixtures("own_descriptors")
def test_descriptors_are_given_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    watch = HostProcesses()
    pids = []
    for _ in range(80):
        # A fork of this process would copy the tables of much memory.
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
            watch.follow(process.pid)
            watch.comm(process.pid)
            pids.append(process.pid)
    for _ in range(2):
        watch.exited()
    watch.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_pids_wrap_around() -> None:
    assert list(_pids_between(10, 13, 100)) == [11, 12, 13]
    assert list(_pids_between(10, 10, 100)) == []
    assert list(_pids_between(997, 302, 1000)) == [998, 999, 300, 301, 302]


def test_no_processes() -> None:
    watch = ProcessWatch()
    watch.follow(1)
    assert (watch.forks(), watch.exited(), watch.comm(1)) == ([], [], None)
    watch.close()


@pytest.mark.usefixtures("own_descriptors")
def test_ends_are_found_without_descriptors(few_descriptors: HostProcesses) -> None:
    """If the watch may keep no descriptors for processes, exited() finds ended processes by their start
    times.
    """
    watch = few_descriptors
    before = len(os.listdir("/proc/self/fd"))
    with child() as followed, child() as other:
        watch.follow(followed)
        watch.follow(other)
        assert watch.comm(followed) == watch.comm(other) == watch.comm(os.getpid())
        assert len(os.listdir("/proc/self/fd")) == before + 2
        assert watch.exited() == []
        assert watch.has_events()
    assert sorted(watch.exited()) == sorted((followed, other))
    assert watch.exited() == []
    assert not watch._starts


def test_the_next_process_of_a_pid_is_another_one(few_descriptors: HostProcesses) -> None:
    """has_ended(pid) returns True, once, when the pid belongs to another process than the followed one.

    It need not wait for exited(), which checks only some processes per call.
    """
    watch = few_descriptors
    with child() as pid:
        watch.follow(pid)
        assert not watch.has_ended(pid)
        watch._starts[pid] = "1"
        assert watch.has_ended(pid)
        assert not watch.has_ended(pid)
        assert watch.exited() == []
        watch.follow(pid)
        assert not watch.has_ended(pid)
    assert watch.exited() == [pid]


def test_a_look_that_fails_ends_nobody(
    few_descriptors: HostProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the host has no free descriptor for a check of a followed process, the process counts as alive."""
    watch = few_descriptors

    def no_descriptor(*_arguments: object, **_options: object) -> object:
        raise OSError(errno.EMFILE, "too many open files")

    with child() as early, child() as late:
        watch.follow(early)
        with monkeypatch.context() as patched:
            patched.setattr("builtins.open", no_descriptor)
            watch.follow(late)
            assert watch.exited() == []
            assert not watch.has_ended(early)
        assert watch.exited() == []
    assert sorted(watch.exited()) == sorted((early, late))


def test_every_process_is_looked_at_in_turn(
    few_descriptors: HostProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emulated_kernel.guests.common.host_processes._STARTS_PER_LOOK", 2)
    watch = few_descriptors
    with child() as first, child() as second:
        with child() as third:
            for pid in (first, second, third):
                watch.follow(pid)
        assert watch.exited() + watch.exited() == [third]
        assert watch.exited() == []


@pytest.mark.usefixtures("events")
def test_forks_of_strangers_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """If fork events are available, the watch does not read facts about forks by processes that are no
    clients.
    """
    watch = HostProcesses()
    looked: list[int] = []
    monkeypatch.setattr(watch, "_look_at", looked.append)
    with child() as pid:
        watch.forks()
        assert pid not in looked
    watch.follow(os.getpid())
    with child() as pid:
        watch.forks()
        assert pid in looked
    watch.close()


@pytest.mark.usefixtures("events")
def test_the_parent_of_a_process_that_has_ended(watch: HostProcesses) -> None:
    """With fork events, the watch reports the parent of a new process even if the new process has already
    ended.
    """
    with child() as pid:
        pass
    (found,) = [fork for fork in watch.forks() if fork.pid == pid]
    assert (found.parent, found.alive) == (os.getpid(), False)


@pytest.mark.usefixtures("events")
def test_a_name_is_asked_for_once_until_another_one_is_told(watch: HostProcesses) -> None:
    """The watch keeps a name until an event reports a new name, which execve or the process itself
    has set.
    """
    script = "read x; printf renamed >/proc/$$/comm; read x; exec cat"
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, bufsize=0) as shell:
        assert shell.stdin is not None
        watch.follow(shell.pid)
        for name in ("sh", "renamed", "cat"):
            until = monotonic() + LIMIT
            while watch.comm(shell.pid) != name:
                assert monotonic() < until
                if watch.has_events():
                    watch.forks()
            watch.forks()
            assert watch.comm(shell.pid) == name
            assert shell.pid in watch._names
            shell.stdin.write(b"\n")
        shell.stdin.close()
    assert watch.has_events()
    assert shell.pid in watch.exited()
    assert watch.comm(shell.pid) is None


def test_who_is_told_nothing_looks(watch: HostProcesses, events: ForkEvents) -> None:
    """If new pids appear without fork events, the watch stops relying on fork events.

    The cause is another listener, which has ended the events.
    """
    watch.follow(os.getpid())
    watch.forks()
    watch.comm(os.getpid())
    assert os.getpid() in watch._names
    events.take = lambda: ({}, set())  # type: ignore[method-assign]
    for _ in range(3):
        assert watch._relies_on_events
        with child():
            watch.forks()
    assert watch.has_events()
    assert not watch._relies_on_events
    assert not watch._names
    watch.comm(os.getpid())
    assert not watch._names


def test_nothing_is_kept_of_clients_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch keeps no data of clients that have ended, even if a client has ended before the call of
    follow().
    """
    monkeypatch.setattr("emulated_kernel.guests.common.host_processes._fork_events", lambda: None)
    watch = HostProcesses()
    with child() as early, child() as late:
        watch.comm(early)
        watch.comm(late)
        watch.follow(early)
    watch.follow(late)
    assert watch.exited() == [early, late]
    assert (watch._families._known, watch._pidfds, watch._pid_of) == ({}, {}, {})
    watch.close()


@pytest.mark.usefixtures("events")
def test_pids_of_another_namespace_are_nobodys() -> None:
    """In another PID namespace, ForkEvents refuses to listen, because the events have pids of the initial
    namespace.
    """
    script = "from emulated_kernel.guests.common.fork_events import ForkEvents\nForkEvents()"
    namespace = ("unshare", "--pid", "--fork", "--mount-proc")
    started = subprocess.Popen((*namespace, sys.executable, "-c", script), stderr=subprocess.PIPE, text=True)
    while started.poll() is None:
        with child():
            pass
    said = started.communicate()[1]
    assert "pids of another namespace" in said
