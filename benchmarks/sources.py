"""kprobefs's own rows of the tables in docs/reference/sources/.

`kprobefs bench hit` and `kinds` measure the times in the same way: minus the time of the unprobed call. Traps
and guest instructions of a hit are counted. `--write` puts the medians, their ratios and the counts into the
pages. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import Distribution, arguments, report, steady

from emulated_kernel.kprobes.profile import RETURN_HOOKS
from kprobefs.measure import bench, bench_cpus, bench_kinds, bench_return

PAGES = Path(__file__).resolve().parents[1] / "docs" / "reference" / "sources"
BY_MODE = [
    (probe, mode)
    for probe in (bench.RECORDING, bench.RETURNING)
    for mode in (bench.STEPPED, bench.BOOSTED, bench.OPTIMIZED)
]
"""The columns of the tables for the papers of 2007 and 2009: kind of handler, and mode."""
Measure = Callable[[int, int], tuple[float, ...]]
"""Function that measures a row of a table.

Its arguments are the hits per round and the number of rounds. It returns the nanoseconds of a hit, or its
count, for each round.
"""
COUNTS = {"traps": "traps a hit here", "instructions": "guest instructions a hit here"}
"""Name of a count -> the beginning of the labels of its rows in the pages."""


@dataclass(frozen=True)
class Row:
    """A row of a table, identified by the label at the start of its line in the page."""

    label: str
    unit: str
    cells: dict[str, Measure]
    compared: int = 0
    """Number of cells in a group; a ratio of each group follows the cells. 0 for a row without ratios."""

    def line(self, medians: list[float]) -> str:
        """Return the row's line in the page, from medians in nanoseconds or counts."""
        if self.unit in COUNTS:
            cells = [f"{median:.1f}".removesuffix(".0") for median in medians]
        else:
            cells = [_shown(median / (1000 if self.unit == "us" else 1)) for median in medians]
        if self.compared:
            groups = range(0, len(medians), self.compared)
            cells += [_ratio(medians[start : start + self.compared]) for start in groups]
        return f"| {self.label} | {' | '.join(cells)} |"


def _ratio(times: list[float]) -> str:
    """Return the text of the ratio of each time to the last time, or "" if one of the times is noise."""
    if min(times) <= 0:
        return ""
    ratios = [time / times[-1] for time in times[:-1]]
    return " : ".join([*(f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}" for ratio in ratios), "1"])


def _shown(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3f}"


def _hit(probe: str, mode: str, arch: str) -> Measure:
    return lambda hits, rounds: bench.measure(bench.HitCase(probe, mode, arch), hits, rounds).net


def _counted(probe: str, mode: str, arch: str, what: str) -> Measure:
    return lambda _hits, _rounds: (getattr(bench.measure(bench.HitCase(probe, mode, arch), 20, 1), what),)


def _on_two(probe: str, mode: str) -> Measure:
    return lambda hits, rounds: bench_cpus.measure(bench_cpus.CpusCase(probe, mode, 2), hits, rounds).net


def _kind(profile: str, kind: str, arch: str) -> Measure:
    case = bench_kinds.KindCase(profile, kind, arch)
    return lambda hits, rounds: tuple(1000 * us for us in bench_kinds.measure(case, hits, rounds).net)


def _return(backend: str, arch: str) -> Measure:
    mode = bench.FTRACE if backend == bench_return.NEEDS_FENTRY else bench.OPTIMIZED
    case = bench_return.ReturnCase(backend, mode, arch=arch)
    return lambda hits, rounds: bench_return.measure(case, hits, rounds).net


def _by_mode(label: str, unit: str, arch: str) -> Row:
    cells = {f"{probe}, {mode}": _hit(probe, mode, arch) for probe, mode in BY_MODE}
    return Row(label, unit, cells, compared=3)


def _counts(place: str, arch: str, by_mode: Sequence[tuple[str, str]]) -> Iterator[Row]:
    for what, title in COUNTS.items():
        cells = {f"{probe}, {mode}": _counted(probe, mode, arch, what) for probe, mode in by_mode}
        yield Row(f"{title}, {place}", what, cells)


ROWS = (
    *(
        Row(
            f"here, {arch}, {label}",
            "us",
            {kind: _kind(profile, kind, arch) for kind in bench_kinds.KINDS},
        )
        for profile, label in (
            ("kprobes-2010", "`kprobes-2010`"),
            (bench_kinds.STEPPED, "each step by the trap flag"),
        )
        for arch in ("i386", "x86_64")
    ),
    _by_mode("here, one CPU", "ns", "x86_64"),
    Row(
        "here, two CPUs",
        "ns",
        {f"{probe}, {mode}": _on_two(probe, mode) for probe, mode in BY_MODE},
        compared=3,
    ),
    *_counts("one CPU", "x86_64", BY_MODE),
    _by_mode("here, i386", "us", "i386"),
    _by_mode("here, x86_64", "us", "x86_64"),
    *_counts("i386", "i386", BY_MODE),
    *_counts("x86_64", "x86_64", BY_MODE),
    Row(
        "here, riscv64",
        "ns",
        {mode: _hit(bench.RECORDING, mode, "riscv64") for mode in (bench.STEPPED, bench.OPTIMIZED)},
        compared=2,
    ),
    *_counts("riscv64", "riscv64", [(bench.RECORDING, mode) for mode in (bench.STEPPED, bench.OPTIMIZED)]),
    *(
        Row(f"a return here, {arch}", "ns", {name: _return(name, arch) for name in RETURN_HOOKS})
        for arch in ("x86_64", "riscv64")
    ),
)


def fill(folder: Path, lines: dict[str, str]) -> None:
    """Replace the lines of the pages that begin with the labels; `lines` is label -> new line.

    Raises: SystemExit if a label has not exactly one line.
    """
    pages = {path: path.read_text().splitlines() for path in folder.glob("*.md")}
    for label, line in lines.items():
        found = [
            (path, number)
            for path, page in pages.items()
            for number, old in enumerate(page)
            if old.startswith(f"| {label} |")
        ]
        if len(found) != 1:
            raise SystemExit(f"{folder}: expected one row {label!r}, found {len(found)}")
        [(path, number)] = found
        pages[path][number] = line
        path.write_text("\n".join(pages[path]) + "\n")


def main() -> None:
    """Run the benchmark and print its figures; with `--write`, put them into the pages."""
    parser = arguments(__doc__)
    parser.add_argument("--hits", type=int, default=20000, help="hits a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--only", metavar="LABEL", choices=[row.label for row in ROWS], help="measure only this row"
    )
    parser.add_argument("--write", action="store_true", help="put the medians into the pages")
    parser.add_argument("--pages", type=Path, default=PAGES, help="(default: docs/reference/sources)")
    options = parser.parse_args()
    figures: list[Distribution] = []
    lines = {}
    for row in ROWS:
        if options.only in (None, row.label):
            measured = list(_measured(row, options))
            figures += measured
            lines[row.label] = row.line([figure.median for figure in measured])
    report(figures, options)
    if options.write:
        fill(options.pages, lines)


def _measured(row: Row, options: argparse.Namespace) -> Iterator[Distribution]:
    for name, measure in row.cells.items():
        yield from steady(options, _cell, row, name, measure, options.hits, options.rounds)


def _cell(row: Row, name: str, measure: Measure, hits: int, rounds: int) -> list[Distribution]:
    unit = row.unit if row.unit in COUNTS else "ns"
    return [Distribution(f"{row.label}: {name}", unit, measure(hits, rounds))]


if __name__ == "__main__":
    main()
