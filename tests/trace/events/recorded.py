"""What a real kernel was recorded to answer, where that is at hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def oracle_path(name: str) -> Path:
    """A file of the recordings; skips the test where there are none."""
    root = os.environ.get("KPROBEFS_ORACLE")
    project = Path(__file__).resolve().parents[3]
    path = (Path(root) if root else project.parent / "shared" / "oracle") / name
    if not path.exists():
        pytest.skip(f"no recordings of a real kernel: {path} is missing; set KPROBEFS_ORACLE")
    return path


def sample(name: str) -> str:
    """The text of a recorded file."""
    return oracle_path(f"samples/{name}").read_text(errors="surrogateescape")
