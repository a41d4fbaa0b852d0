"""benchmarks/: they start and report what README's tables need. No figure is judged here."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
QUICK = {
    "events.py": ["--counts", "10", "--rounds", "1", "--daemons", "1"],
    "hit.py": ["--hits", "200", "--rounds", "1"],
    "first_line.py": ["--runs", "1"],
    "start_up.py": ["--runs", "1"],
    "boot.py": ["--runs", "1"],
    "elf.py": ["--runs", "1"],
    "instructions.py": ["--rounds", "1", "--kib", "1"],
    "sources.py": ["--hits", "50", "--rounds", "1", "--only", "here, riscv64"],
    "state.py": ["--hits", "200", "--rounds", "1"],
    "vcpus.py": ["--rounds", "1", "--switches", "10"],
    "ways.py": [],
    "scratch.py": ["--rounds", "1", "--mib", "1"],
    "idle.py": ["--seconds", "0.1"],
    "open_read_close.py": ["--batches", "2", "--size", "5"],
}


def run(name: str, *options: str) -> str:
    command = [sys.executable, BENCHMARKS / name, *options]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.parametrize("name", sorted({*QUICK, "real_linux.py", "round.py"}))
def test_says_what_it_measures(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
    assert ended.value.code == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.mounted
@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="/dev/fuse is missing")
@pytest.mark.parametrize("name", sorted(QUICK))
def test_reports_distributions(name: str) -> None:
    if name in ("scratch.py", "open_read_close.py") and (os.geteuid() != 0 or shutil.which("gcc") is None):
        pytest.skip("what it compares with needs gcc and root")
    figures = json.loads(run(name, "--json", *QUICK[name]))
    assert figures
    for figure in figures:
        assert figure["samples"] >= 1
        assert figure["min"] <= figure["p10"] <= figure["median"] <= figure["p90"]


def test_a_distribution_has_median_deciles_and_ratio() -> None:
    program = (
        "from common import Distribution, report\n"
        "first = Distribution('first', 'us', tuple(range(1, 12)), target=6)\n"
        "second = Distribution('second', 'us', (12.0,), target=6)\n"
        "report([first, second], as_json=False)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=BENCHMARKS, check=True, capture_output=True, text=True
    )
    _, first, second = done.stdout.splitlines()
    assert first.split() == ["first,", "us", "6.000", "2.000", "10.000", "1.00", "6", "met"]
    assert second.split() == ["second,", "us", "12.000", "12.000", "12.000", "2.00", "6", "missed"]


def test_deciles_of_equal_samples_are_the_sample() -> None:
    """Interpolated carelessly, those of 6.9632 come out beside it."""
    program = (
        "from common import Distribution, report\n"
        "report([Distribution('pages', 'kB', (6.9632,) * 3)], as_json=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=BENCHMARKS, check=True, capture_output=True, text=True
    )
    (figure,) = json.loads(done.stdout)
    assert {figure[name] for name in ("min", "p10", "median", "p90")} == {6.9632}


def _lines(folder: Path) -> list[str]:
    return [line for path in sorted(folder.glob("*.md")) for line in path.read_text().splitlines()]


def test_rows_of_the_sources_are_filled_in(tmp_path: Path) -> None:
    """Each has its place in one page, and one run fills one row."""
    pages, copies = BENCHMARKS.parent / "docs" / "reference" / "sources", tmp_path / "sources"
    shutil.copytree(pages, copies)
    run("sources.py", *QUICK["sources.py"], "--write", "--pages", str(copies))
    before, after = _lines(pages), _lines(copies)
    [(old, new)] = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]] or [("", "")]
    assert old.startswith("| here, riscv64 |")
    assert re.fullmatch(r"\| here, riscv64 \|( -?[\d.]+ \|){2} -?\d* ?\|", new)
    program = "import sources; print(*(row.label for row in sources.ROWS), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=BENCHMARKS, check=True, capture_output=True, text=True
    )
    for label in done.stdout.splitlines():
        assert sum(line.startswith(f"| {label} |") for line in before) == 1, label
