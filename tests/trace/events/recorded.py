"""Access to recorded answers of a real kernel, on machines that have the recordings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def oracle_path(name: str) -> Path:
    """Return the path of a recorded file; skip the test if there are no recordings."""
    root = os.environ.get("KPROBEFS_ORACLE")
    project = Path(__file__).resolve().parents[3]
    path = (Path(root) if root else project.parent / "shared" / "oracle") / name
    if not path.exists():
        pytest.skip(f"no recordings of a real kernel: {path} is missing; set KPROBEFS_ORACLE")
    return path


def sample(name: str) -> str:
    """Return the text of a recorded file."""
    return oracle_path(f"samples/{name}").read_text(errors="surrogateescape")
