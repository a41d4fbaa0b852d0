"""The watchdog's process: what it has heard, whenever somebody asks for that."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kprobefs.heartbeat import Heartbeat
from kprobefs.mount import STATE_LINK
from tests.fuse.harness import eventually


@pytest.fixture
def heartbeat(tmp_path: Path) -> Iterator[Heartbeat]:
    (tmp_path / STATE_LINK).symlink_to("serving")
    made = Heartbeat(str(tmp_path), 0.002)
    yield made
    made.end()


def test_the_latest_of_several_answers(heartbeat: Heartbeat, tmp_path: Path) -> None:
    heartbeat.start()
    time.sleep(0.1)
    assert heartbeat.answer() == "serving"
    (tmp_path / "other").symlink_to("panicked")
    time.sleep(0.1)
    (tmp_path / "other").rename(tmp_path / STATE_LINK)
    time.sleep(0.1)
    assert heartbeat.answer() == "panicked"
    (tmp_path / STATE_LINK).unlink()
    eventually(lambda: not heartbeat.answer())
