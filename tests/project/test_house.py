"""The table of what the house weighs: counted by tests.house, and the page's figures are near it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import house

PAGE = house.ROOT / "docs" / "architecture.md"
NEAR, SHARE = 50, 20
"""The page may be behind by so many lines, or by such a part of what is counted."""


def documented() -> dict[str, list[int]]:
    lines = re.findall(r"^\| ([\w. ]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", PAGE.read_text(), re.M)
    return {name: [int(number) for number in numbers] for name, *numbers in lines}


def test_the_page_has_what_is_counted() -> None:
    told = documented()
    assert list(told)[-1] == "all"
    found = {row.package: [*row[1:], row.now - row.of_features] for row in house.rows()}
    assert told.keys() == found.keys()
    for name, numbers in found.items():
        assert told[name][0] == numbers[0]
        for said, counted in zip(told[name], numbers, strict=True):
            assert abs(said - counted) <= max(NEAR, counted // SHARE), (name, told[name], numbers)


def test_sums() -> None:
    *packages, whole = house.rows()
    assert whole.now == sum(house.lines_of(path) for path in house.LIBRARY.rglob("*.py"))
    assert whole.of_features == sum(house.by_feature().values())
    assert whole.before == sum(row.before for row in packages) == 44454


def test_a_file_is_one_features(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(house, "LIBRARY", tmp_path)
    (tmp_path / "a.py").write_text("x = 1\n")
    for features in ({"one": ("a.py",), "two": ("*.py",)}, {"one": ("b.py",)}):
        monkeypatch.setattr(house, "FEATURES", features)
        with pytest.raises(ValueError, match="counted already"):
            house.feature_files()
