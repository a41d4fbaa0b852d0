"""Fixtures: a directory to mount on, and a daemon that serves it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kprobefs.mount import detach
from tests.fuse.harness import Daemon, daemon, is_mounted


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of test daemons stay out of the user's."""
    monkeypatch.setenv("KPROBEFS_RUNTIME_DIRECTORY", str(tmp_path / "runtime"))


@pytest.fixture
def directory() -> Iterator[Path]:
    """An empty directory that every user reaches; what is still mounted there afterwards is detached."""
    with tempfile.TemporaryDirectory(prefix="kprobefs-test-") as parent:
        path = Path(os.path.realpath(parent)) / "mnt"
        path.mkdir()
        path.parent.chmod(0o755)
        yield path
        while is_mounted(path):
            detach(str(path))


@pytest.fixture
def mounted(directory: Path) -> Iterator[Daemon]:
    """A daemon that serves the full layout of the fake kernel."""
    with daemon(directory) as running:
        yield running
