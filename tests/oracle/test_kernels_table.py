"""The table of kernels keeps columns that a run did not measure, and counts the kept outcomes of Linux's
tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from stress import kernel_selftests
from stress.kernel_selftests import Outcome, Selftests, directories, version_for
from stress.kernels import RULE, merged


def row(differences: str, selftests: str, failing: str, date: str) -> str:
    return f"| 7.2 | `kernel` | 9 of 9 |  |  | {differences} | {selftests} | {failing} | 1 s | 2 s | {date} |"


def test_a_new_row_keeps_columns_that_it_did_not_measure() -> None:
    table = f"{RULE}\n{row('1 of 9', '8 of 9', 'kprobe/x', 'old')}\n"
    assert merged(table, [row("", "", "", "new")]) == [row("1 of 9", "8 of 9", "kprobe/x", "new")]
    assert merged(table, [row("0 of 9", "9 of 9", "", "new")]) == [row("0 of 9", "9 of 9", "", "new")]
    other = row("", "", "", "new").replace("7.2", "6.12")
    assert merged(table, [other]) == [other, row("1 of 9", "8 of 9", "kprobe/x", "old")]


def test_versions_of_tests() -> None:
    found = [version_for(release) for release in ("5.10.0-32-amd64", "6.18.15+deb13", "7.3.4", "5.4.0")]
    assert found == ["5.10", "6.12", "7.2", "5.10"]


def test_kept_outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kprobe/a.tc", "kprobe/b.tc", "event/sub/c.tc", "other/d.tc"):
        (tmp_path / "test.d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "test.d" / name).touch()
    monkeypatch.setattr(kernel_selftests, "fetched", lambda _version: tmp_path)
    assert directories(tmp_path) == ["kprobe", "event", "other"]
    tests = Selftests(tmp_path / "kept")
    assert tests.cells("7.2", "kernel") == ("", "")
    results = {"kprobe/a.tc": "PASS", "kprobe/b.tc": "FAIL", "event/sub/c.tc": "XFAIL"}
    for name, result in results.items():
        tests.keep(Outcome("7.2", "kernel", name, "top", result))
    again = Selftests(tmp_path / "kept")
    assert again.cells("7.2", "kernel") == ("2 of 3 (kprobe, event)", "kprobe/b")
    again.keep(Outcome("7.2", "kernel", "other/d.tc", "top", "UNSUPPORTED"))
    assert again.cells("7.2", "kernel") == ("2 of 4", "kprobe/b")
    assert again.cells("7.2", "kprobefs") == ("", "")
