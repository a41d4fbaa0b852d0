"""Fixtures: a directory to mount on, and a daemon that serves it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kprobefs.common.mountpoints import detach
from tests.fuse.harness import Daemon, daemon, is_mounted


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a separate runtime directory, so that its daemons' records are apart from the user's."""
    monkeypatch.setenv("KPROBEFS_RUNTIME_DIRECTORY", str(tmp_path / "runtime"))


@contextmanager
def mount_point() -> Iterator[Path]:
    """Yield an empty directory that each user can reach; afterwards, detach all mounts on it."""
    with tempfile.TemporaryDirectory(prefix="kprobefs-test-") as parent:
        path = Path(os.path.realpath(parent)) / "mnt"
        path.mkdir()
        path.parent.chmod(0o755)
        yield path
        while is_mounted(path):
            detach(str(path))


@pytest.fixture
def directory() -> Iterator[Path]:
    """Yield a mount point for one test."""
    with mount_point() as path:
        yield path


@pytest.fixture
def mounted(directory: Path) -> Iterator[Daemon]:
    """Yield a daemon that serves the full layout."""
    with daemon(directory) as running:
        yield running
