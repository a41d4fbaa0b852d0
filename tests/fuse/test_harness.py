"""The test harness's `watched`: if a process had to be killed, the failure of the test names this process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.fuse.harness import watched


@pytest.fixture
def stuck() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that does not end by itself in time."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_a_process_that_is_stuck_fails_the_test(stuck: subprocess.Popen[bytes]) -> None:
    with (
        pytest.raises(AssertionError, match=f"process {stuck.pid} was killed after 0.05 s"),
        watched(stuck, 0.05),
    ):
        stuck.wait()


def test_another_failure_says_that_the_process_was_killed(stuck: subprocess.Popen[bytes]) -> None:
    with pytest.raises(FileNotFoundError) as raised, watched(stuck, 0.05):
        os.stat(f"/no/such/{stuck.wait()}")
    (note,) = raised.value.__notes__
    assert note.startswith(f"process {stuck.pid} was killed after 0.05 s")


def test_a_process_that_is_in_time_fails_nothing(stuck: subprocess.Popen[bytes]) -> None:
    with watched(stuck):
        pass
    with pytest.raises(ZeroDivisionError) as raised, watched(stuck):
        raise ZeroDivisionError
    assert not hasattr(raised.value, "__notes__")
    assert stuck.poll() is None


def test_a_test_that_has_killed_its_daemon_may_take_longer(stuck: subprocess.Popen[bytes]) -> None:
    with watched(stuck, 0.05):
        stuck.terminate()
        stuck.wait()
        with pytest.raises(subprocess.TimeoutExpired):
            subprocess.run(["sleep", "60"], timeout=0.2, check=False)
