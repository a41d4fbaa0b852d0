"""The registry of daemons: a new daemon's record takes the name of an ended daemon's record."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import pytest

from kprobefs.common import daemon_registry
from kprobefs.common.daemon_registry import Daemon, Registration, running, runtime_directory, sweep
from kprobefs.common.errors import CliError

DAEMON = Daemon(os.getpid(), "/somewhere", "x86_64", "full", "0", "now")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KPROBEFS_RUNTIME_DIRECTORY", str(tmp_path))


def test_a_record_lives_as_long_as_its_daemon() -> None:
    registration = Registration(DAEMON)
    assert running("/somewhere") == DAEMON
    registration.close()
    assert running("/somewhere") is None


def test_a_record_removed_while_its_lock_was_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the old daemon unlinks and unlocks its record between the new daemon's open and lock, the new daemon
    still gets a record.
    """
    running_still = [Registration(DAEMON)]
    really_lock = daemon_registry._lock

    def lock(file: TextIO, is_served: Callable[[], bool]) -> bool:
        while running_still:
            running_still.pop().close()
        return really_lock(file, is_served)

    monkeypatch.setattr(daemon_registry, "_lock", lock)
    new = Registration(DAEMON)
    assert running("/somewhere") == DAEMON
    new.close()


@pytest.fixture
def left() -> Path:
    """Return the record of a killed daemon."""
    registration = Registration(DAEMON)
    (record,) = runtime_directory().iterdir()
    registration._file.close()
    return record


def test_a_slow_removal_of_old_records_refuses_no_daemon(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new daemon waits while another process, which removes the old record, holds the lock of this record.

    The other process may have to wait for a CPU.
    """
    pauses = []
    with left.open() as held:
        left.write_text("")

        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 30:
                left.unlink()
                fcntl.flock(held, fcntl.LOCK_UN)

        clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
        monkeypatch.setattr(daemon_registry, "time", clock)
        monkeypatch.setattr(daemon_registry, "sweep", lambda: None)
        fcntl.flock(held, fcntl.LOCK_EX)
        new = Registration(DAEMON)
    assert len(pauses) == 30
    assert running("/somewhere") == DAEMON
    new.close()


def test_a_lock_that_is_never_released_refuses_a_daemon(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_registry, "LOCK_TIMEOUT", 0.05)
    left.write_text("")
    with left.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(CliError, match="another kprobefs daemon serves it"):
            Registration(DAEMON)


def test_two_removals_of_a_record_leave_the_next_one(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that removes an old record does not remove the record that a new daemon has made meanwhile.

    In this test, another process removes the old record between the open and the lock of the first process.
    """
    made: list[Registration] = []
    flock = fcntl.flock

    def late(file: TextIO, how: int) -> None:
        if not made:
            left.unlink()
            monkeypatch.undo()
            monkeypatch.setenv("KPROBEFS_RUNTIME_DIRECTORY", str(left.parents[1]))
            made.append(Registration(DAEMON))
        flock(file, how)

    monkeypatch.setattr(daemon_registry.fcntl, "flock", late)
    sweep()
    assert running("/somewhere") == DAEMON
    made[0].close()
