"""Reads recordings of Linux 6.1's answers. A test is skipped if its recording is missing."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_DEFAULT = Path(__file__).resolve().parents[2].parent / "shared" / "oracle"


def oracle_path(name: str) -> Path:
    """Return the path of a recorded file; skip the test if the file is absent."""
    path = Path(os.environ.get("KPROBEFS_ORACLE", _DEFAULT)) / name
    if not path.exists():
        pytest.skip(f"no oracle: {path} is missing (set KPROBEFS_ORACLE)")
    return path


@cache
def quirks() -> dict[str, Any]:
    """Return the contents of samples/quirks.json."""
    parsed: dict[str, Any] = json.loads(oracle_path("samples/quirks.json").read_text())
    return parsed


def errors(file: str) -> list[dict[str, Any]]:
    """Return the records of all recorded writes to the file `file`."""
    lines = oracle_path("errors-6.1.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["file"] == file]


def modes(sample: str, prefix: str) -> dict[str, str]:
    """Return name below `prefix` -> mode in the form of `ls`, from a sample ls_*.txt."""
    found = {}
    for line in oracle_path(f"samples/{sample}").read_text().splitlines():
        words = line.split()
        if len(words) > 2 and words[-1].startswith(prefix):
            found[words[-1].removeprefix(prefix)] = words[0]
    return found
