"""The registry of daemons: a new daemon's record takes the name of an ended daemon's record."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO

import pytest

from kprobefs.common import daemon_registry
from kprobefs.common.daemon_registry import Daemon, Registration, running

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

    def lock(file: TextIO) -> bool:
        while running_still:
            running_still.pop().close()
        return really_lock(file)

    monkeypatch.setattr(daemon_registry, "_lock", lock)
    new = Registration(DAEMON)
    assert running("/somewhere") == DAEMON
    new.close()
