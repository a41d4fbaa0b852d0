"""The attacks of `python -m stress.endurance`, each for a short time."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

import pytest

from stress.endurance import late
from stress.endurance.attacks import full_disk, kills, leap, operations, readers, traffic
from stress.endurance.starved import starved
from tests.fuse.conftest import directory, runtime
from tests.fuse.harness import environment, needs_fuse

__all__ = ["directory", "runtime"]

pytestmark = [needs_fuse, pytest.mark.mounted]
PATIENT = 30.0
"""Time limit of a request in seconds, which allows for other work of the machine."""


def test_operations_of_all_kinds(directory: Path) -> None:
    assert "kinds" in operations(directory, 300, 0, 1, PATIENT)


_WAITING = """
import faulthandler, sys, time
from stress.endurance.late import SIGNAL
def stands_here():
    print("ready", flush=True)
    time.sleep(60)
faulthandler.register(SIGNAL, all_threads=True)
stands_here()
"""


def test_a_late_request_is_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late request is reported once, and the daemon's stacks are in the daemon's log."""
    monkeypatch.setattr(late, "LATE", 0.3)
    command = [sys.executable, "-c", _WAITING]
    with subprocess.Popen(command, env=environment(), stdout=PIPE, stderr=PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == "ready\n"
        began = time.monotonic()
        watchdog = late.LateRequests(daemon.pid, lambda: began)
        watchdog.start()
        assert daemon.stderr is not None
        assert any("in stands_here" in line for line in iter(daemon.stderr.readline, ""))
        time.sleep(3 * late.BEAT)
        daemon.terminate()
        daemon.communicate()
    (report,) = watchdog.reports
    assert re.match(
        r"after \d+\.\d+ s: the daemon has used \d+\.\d+ s of the CPU, a sleep of 0\.1 s took", report
    )


def test_killed_daemons(directory: Path) -> None:
    assert kills(directory, 1, 0, 1) == "1 daemons killed"


def test_writers_and_readers(directory: Path) -> None:
    assert "records" in traffic(directory, 0, 0.3, 1)


def test_a_full_disk(directory: Path) -> None:
    assert "1 mounts" in full_disk(directory, 1, 0, 1)


def test_many_sleeping_readers(directory: Path) -> None:
    assert "200 readers" in readers(directory, 200, 0, 1, PATIENT)


def test_no_memory_and_no_threads(directory: Path) -> None:
    assert "no memory" in starved(directory, 1, 0, 1, PATIENT)


def test_other_clocks(directory: Path) -> None:
    if "not run" in leap(directory, 0, 0, 1):
        pytest.skip("there is no faketime")
