"""Fixtures: real mounts of the real kernel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuse.conftest import directory, runtime
from tests.fuse.harness import REAL_PROGRAM, Daemon, daemon
from tests.mounted.files import Files

__all__ = ["directory", "runtime"]


@pytest.fixture
def mounted(directory: Path) -> Iterator[Daemon]:
    """A daemon that serves the emulated kernel; its log must tell of no fault."""
    with daemon(directory, program=REAL_PROGRAM) as running:
        yield running
    assert "ERROR" not in running.log, running.log
    assert "Traceback" not in running.log, running.log


@pytest.fixture
def files(mounted: Daemon) -> Files:
    """Its files."""
    return Files(mounted.directory)
