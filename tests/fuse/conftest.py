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
    """Records of test daemons stay out of the user's."""
    monkeypatch.setenv("KPROBEFS_RUNTIME_DIRECTORY", str(tmp_path / "runtime"))


@contextmanager
def mount_point() -> Iterator[Path]:
    """An empty directory that every user reaches; what is still mounted there afterwards is detached."""
    with tempfile.TemporaryDirectory(prefix="kprobefs-test-") as parent:
        path = Path(os.path.realpath(parent)) / "mnt"
        path.mkdir()
        path.parent.chmod(0o755)
        yield path
        while is_mounted(path):
            detach(str(path))


@pytest.fixture
def directory() -> Iterator[Path]:
    """A mount point of the test's own."""
    with mount_point() as path:
        yield path


@pytest.fixture
def mounted(directory: Path) -> Iterator[Daemon]:
    """A daemon that serves the full layout."""
    with daemon(directory) as running:
        yield running
