"""Fixtures: a directory for a state, and a state with definitions and records."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.state.life import CLIENT, DEFINITIONS, Run


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a state with definitions and records."""
    directory = tmp_path_factory.mktemp("left") / "state"
    run = Run(directory)
    run.write("/kprobe_events", DEFINITIONS)
    run.mount.mkdir(CLIENT, "/tracing/instances/slow", 0o755)
    for where in ("/tracing", "/tracing/instances/slow"):
        run.write(f"{where}/events/kprobes/reads/enable", "1")
    run.hit(60)
    run.end()
    return directory


@pytest.fixture
def copied(left: Path, place: Path) -> Path:
    """Return a copy of the state for one test."""
    subprocess.run(["cp", "-a", "--sparse=always", str(left), str(place)], check=True)
    return place
