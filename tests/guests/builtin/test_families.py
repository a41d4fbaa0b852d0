"""Forks that the host's kernel does not report: a new process counts as a client's child only if this is
certain.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from emulated_kernel.guests.common.host_processes import MAX_FORKS_PER_LOOK, HostProcesses
from tests.sample import fewer

FORKING = Path(__file__).with_name("forking.py")
ATTEMPTS = fewer(30, 3)
QUIET_WITHIN = 1000
"""Number of attempts; in at least one attempt, no other process of the host should fork."""


class Forking:
    """A process that forks and waits on command."""

    def __init__(self) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        # This is a new program, because forks of the tests' process would copy large page tables.
        command = [sys.executable, "-I", "-S", FORKING, str(commands), str(answers)]
        self._process = subprocess.Popen(command, pass_fds=(commands, answers))
        self.pid = self._process.pid
        os.close(commands)
        os.close(answers)
        assert os.read(self._answers, 1) == b"+"

    def _do(self, command: bytes) -> int:
        os.write(self._commands, command)
        return int.from_bytes(os.read(self._answers, 4), "little")

    def fork(self) -> int:
        """Let the process fork a child that ends, and wait for this child. Return the child's pid."""
        return self._do(b"f")

    def keep(self) -> int:
        """Let the process fork a child that lives on. Return the child's pid."""
        return self._do(b"k")

    def wait(self) -> int:
        """End the last child that keep() has forked, and let the process wait for this child.

        Return the child's pid.
        """
        return self._do(b"w")

    def close(self) -> None:
        os.close(self._commands)
        os.close(self._answers)
        self._process.wait()


@pytest.fixture
def client() -> Iterator[Forking]:
    process = Forking()
    yield process
    process.close()


@pytest.fixture
def stranger() -> Iterator[Forking]:
    process = Forking()
    yield process
    process.close()


@pytest.fixture
def watch(client: Forking, stranger: Forking, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostProcesses]:
    """Yield a HostProcesses that gets no fork events, after a first request of the client."""
    del stranger
    monkeypatch.setattr("emulated_kernel.guests.common.host_processes._fork_events", lambda: None)
    watch = HostProcesses()
    watch.comm(client.pid)
    watch.forks()
    yield watch
    watch.close()


def parents(watch: HostProcesses, *pids: int) -> list[int | None]:
    """Return the parent that the watch reports for each of `pids`, or None.

    Check that the watch reports a bounded number of forks.
    """
    found = {fork.pid: fork.parent for fork in watch.forks()}
    assert len(found) <= MAX_FORKS_PER_LOOK
    return [found.get(pid) for pid in pids]


def test_a_fork_that_a_client_has_waited_for(watch: HostProcesses, client: Forking) -> None:
    told = (parents(watch, client.fork())[0] for _ in range(QUIET_WITHIN))
    assert next(parent for parent in told if parent is not None) == client.pid


def test_a_strangers_fork_is_not_a_clients(watch: HostProcesses, stranger: Forking) -> None:
    assert {parents(watch, stranger.fork())[0] for _ in range(ATTEMPTS)} == {None}


def test_nor_is_it_when_the_client_waits_for_another_child(
    watch: HostProcesses, client: Forking, stranger: Forking
) -> None:
    for _ in range(ATTEMPTS):
        kept = client.keep()
        parents(watch, kept)
        assert client.wait() == kept
        assert parents(watch, stranger.fork()) == [None]


def test_a_request_tells_that_earlier_children_have_ended(watch: HostProcesses, client: Forking) -> None:
    def told() -> int | None:
        parents(watch, client.keep())
        client.wait()
        watch.comm(client.pid)
        return parents(watch, client.fork())[0]

    attempts = (told() for _ in range(QUIET_WITHIN))
    assert next(parent for parent in attempts if parent is not None) == client.pid


def test_nor_when_both_have_forked(watch: HostProcesses, client: Forking, stranger: Forking) -> None:
    for _ in range(ATTEMPTS):
        assert parents(watch, client.fork(), stranger.fork()) == [None, None]


def test_nor_when_the_client_has_waited_before_that(
    watch: HostProcesses, client: Forking, stranger: Forking
) -> None:
    for _ in range(ATTEMPTS):
        parents(watch, client.fork())
        assert parents(watch, stranger.fork()) == [None]


def test_nor_where_it_forks_while_it_is_looked_at(
    watch: HostProcesses, client: Forking, stranger: Forking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's fork is not the client's, even if the client forks while the watch looks at the new
    process.
    """
    look_at = watch._look_at

    def forking_meanwhile(pid: int) -> object:
        client.fork()
        return look_at(pid)

    for _ in range(ATTEMPTS):
        watch.forks()
        with monkeypatch.context() as patch:
            pid = stranger.fork()
            patch.setattr(watch, "_look_at", forking_meanwhile)
            assert parents(watch, pid) == [None]
