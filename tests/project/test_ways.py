"""The four ways through the code stay as short as they are: counts, in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import ways

ROOT = Path(__file__).resolve().parents[2]


class Limits(NamedTuple):
    """At most so many; lower them when a way became shorter."""

    calls: int
    files: int
    upward: int
    lookups: int = 0


WAYS = {
    "define": Limits(256, 48, 1, lookups=1),
    "hit, in Python": Limits(1450, 83, 8),
    "hit, in guest code": Limits(527, 47, 6),
    "read, nothing probed": Limits(168, 22, 0),
    "read, another probed": Limits(168, 22, 0),
    "disarm 1": Limits(352, 46, 4),
    "disarm 100": Limits(3200, 57, 12),
}
LINES, PROTOCOLS, UNPLACED = 50_800, 11, 0


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.ways", "--json"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert not result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    assert result.returncode == bool(report["unplaced"])
    return report


@pytest.mark.parametrize("name", WAYS)
def test_length_of_a_way(found: dict[str, Any], name: str) -> None:
    way, limits = found["ways"][name], WAYS[name]
    assert len(way["files"]) < way["calls"] <= limits.calls
    assert 5 < len(way["files"]) <= limits.files
    assert sum(way["upward"].values()) <= limits.upward, way["upward"]
    assert way["lookups"] <= limits.lookups
    assert bool(way["lookups"]) == (name == "define")


def test_size(found: dict[str, Any]) -> None:
    assert set(found["ways"]) == set(WAYS)
    assert found["lines"] <= LINES
    assert found["protocols"] <= PROTOCOLS
    assert len(found["unplaced"]) <= UNPLACED, found["unplaced"]


CONTRACTS = """
[tool.importlinter]
root_packages = ["top", "low"]
[[tool.importlinter.contracts]]
type = "layers"
layers = ["top", "low"]
[[tool.importlinter.contracts]]
type = "layers"
containers = ["low"]
layers = ["a | b", "c"]
"""


def test_layers_come_from_the_contracts(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text(CONTRACTS)
    layers = ways.Layers(path)
    names = ("top.x", "low.a.x", "low.b", "low.ab", "low.c.d.e", "low", "lo")
    assert [layers.depth_of(name) for name in names] == [0, 1, 1, None, 2, None, None]


def test_the_table_fits_a_terminal() -> None:
    report = ways.Report({"hit, in guest code": ways.Count(100_000)}, 99_999, 999, ["emulated_kernel.x"] * 40)
    lines = list(ways.table(report, every=False))
    assert max(map(len, lines)) <= 80
    assert "error: 40 modules in no layer, so no crossing of theirs is counted:" in lines
