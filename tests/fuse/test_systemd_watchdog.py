"""ServiceWatchdog, the process that queries a mount's state for systemd, with mounts that are serving, busy
or hung.
"""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from select import select
from types import SimpleNamespace

import pytest

from kprobefs.common.mountpoints import STATE_LINK
from kprobefs.daemon import systemd_watchdog as heartbeat_module
from kprobefs.daemon.systemd_watchdog import ServiceWatchdog
from tests.fuse.harness import eventually


@pytest.fixture
def heartbeat(tmp_path: Path) -> Iterator[ServiceWatchdog]:
    (tmp_path / STATE_LINK).symlink_to("serving")
    made = ServiceWatchdog(str(tmp_path), 0.002)
    yield made
    made.end()


def await_reports(heartbeat: ServiceWatchdog, count: int) -> None:
    """Wait until the child process has written at least `count` more reports."""

    def unread() -> int:
        size = fcntl.ioctl(heartbeat.descriptor, termios.FIONREAD, bytes(4))
        return int(struct.unpack("i", size)[0])

    before = unread()
    eventually(lambda: unread() - before >= count * len("panicked\n"))


def test_the_latest_of_several_answers(heartbeat: ServiceWatchdog, tmp_path: Path) -> None:
    heartbeat.start()
    await_reports(heartbeat, 2)
    assert heartbeat.answer() == "serving"
    (tmp_path / "other").symlink_to("panicked")
    await_reports(heartbeat, 2)
    (tmp_path / "other").rename(tmp_path / STATE_LINK)
    # The child process may have read the link before the rename.
    await_reports(heartbeat, 2)
    assert heartbeat.answer() == "panicked"
    (tmp_path / STATE_LINK).unlink()
    eventually(lambda: not heartbeat.answer())


class TestBusy:
    """ServiceWatchdog with a mount that does not answer.

    The test's own process takes the place of the daemon.
    """

    @pytest.fixture
    def gate(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Return the path of a file that delays all answers of the mount until the file is removed."""
        gate, readlink = tmp_path / "gate", os.readlink
        gate.touch()

        def waiting(link: str | Path, **more: int) -> str:
            # pytest reads other links for its report of a failure.
            while link == tmp_path / STATE_LINK and gate.exists():
                time.sleep(0.01)
            return readlink(link, **more)

        monkeypatch.setattr(heartbeat_module, "CONTROL_TIMEOUT", 0.05)
        monkeypatch.setattr(heartbeat_module.os, "readlink", waiting)
        return gate

    def test_one_that_works(self, gate: Path, tmp_path: Path) -> None:
        for beat in self.beats(tmp_path):
            found = {beat.answer() for _ in range(3) if self.works(beat)}
            assert found == {"busy"}
            gate.unlink()
            eventually(lambda beat=beat: beat.answer() == "serving")

    def test_one_that_does_nothing(self, gate: Path, tmp_path: Path) -> None:
        """If the daemon neither answers nor uses the CPU, the watchdog reports nothing until the mount
        answers again.
        """
        for beat in self.beats(tmp_path):
            eventually(lambda beat=beat: not select([beat.descriptor], [], [], 0.5)[0] or not beat.answer())
            gate.unlink()
            eventually(lambda beat=beat: beat.answer() == "serving")

    def test_a_late_answer_is_reported_when_it_comes(
        self, gate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If an idle daemon answers late, the watchdog reports this answer as soon as it arrives.

        On a busy host, systemd would otherwise kill the daemon.
        """
        late, interval_is_over = tmp_path / "late", tmp_path / "over"
        ask = heartbeat_module._Condition.ask

        def noted(condition: heartbeat_module._Condition) -> str:
            told = ask(condition)
            if not condition.is_alive:
                late.touch()
            return told

        def sleep(_interval: float) -> None:
            while not interval_is_over.exists():
                time.sleep(0.01)
            interval_is_over.unlink()

        monkeypatch.setattr(heartbeat_module._Condition, "ask", noted)
        # The daemon has used no CPU time.
        monkeypatch.setattr(heartbeat_module, "CPU_TIMES", slice(0))
        clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
        monkeypatch.setattr(heartbeat_module, "time", clock)
        gate.unlink()
        for beat in self.beats(tmp_path):
            assert beat.answer() == "serving"
            gate.touch()
            interval_is_over.touch()
            eventually(late.exists)
            gate.unlink()
            eventually(lambda beat=beat: select([beat.descriptor], [], [], 0)[0])
            assert beat.answer() == "serving"

    def test_one_that_works_for_ever(
        self, gate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(heartbeat_module, "BUSY_LIMIT", 0.3)
        for beat in self.beats(tmp_path):
            eventually(lambda beat=beat: not self.works(beat, 0.5) or not beat.answer())
            gate.unlink()

    def beats(self, directory: Path) -> Iterator[ServiceWatchdog]:
        (directory / STATE_LINK).symlink_to("serving")
        made = ServiceWatchdog(str(directory), 0.02)
        made.start()
        yield made
        made.end()

    def works(self, beat: ServiceWatchdog, patience: float = 10) -> bool:
        """Use the CPU until the watchdog writes a report or `patience` seconds are over.

        Return True if there is a report.
        """
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if select([beat.descriptor], [], [], 0)[0]:
                return True
        return False
