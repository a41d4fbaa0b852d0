"""kprobefs's own rows of the tables in docs/reference/sources/.

The times are measured as by `kprobefs bench hit` and `kinds`, less the time of the unprobed call.
`--write` puts the medians into the pages. Run it on an otherwise idle machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common import Distribution, arguments, report

from emulated_kernel.kprobes.profile import RETURN_HOOKS
from kprobefs.measure import bench, bench_cpus, bench_kinds, bench_return

PAGES = Path(__file__).resolve().parents[1] / "docs" / "reference" / "sources"
BY_MODE = [
    (probe, mode)
    for probe in (bench.RECORDING, bench.RETURNING)
    for mode in (bench.STEPPED, bench.BOOSTED, bench.OPTIMIZED)
]
"""The columns of the tables of 2007 and 2009."""
Measure = Callable[[int, int], tuple[float, ...]]
"""Function from hits a round and number of rounds to the nanoseconds of a hit in each round."""


@dataclass(frozen=True)
class Row:
    """A row of a table, identified by the label at the start of its line in the page."""

    label: str
    unit: str
    cells: dict[str, Measure]
    has_ratio: bool = False
    """True if a last cell gives the ratio of the first cell to the second."""

    def line(self, medians: list[float]) -> str:
        """Return the line of the page, from medians in nanoseconds."""
        scale = 1000 if self.unit == "us" else 1
        cells = [_shown(median / scale) for median in medians]
        if self.has_ratio:
            cells.append(f"{medians[0] / medians[1]:.0f}" if medians[1] > 0 else "")
        return f"| {self.label} | {' | '.join(cells)} |"


def _shown(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3f}"


def _hit(probe: str, mode: str, arch: str) -> Measure:
    return lambda hits, rounds: bench.measure(bench.HitCase(probe, mode, arch), hits, rounds).net


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
    return Row(label, unit, {f"{probe}, {mode}": _hit(probe, mode, arch) for probe, mode in BY_MODE})


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
    Row("here, two CPUs", "ns", {f"{probe}, {mode}": _on_two(probe, mode) for probe, mode in BY_MODE}),
    _by_mode("here, i386", "us", "i386"),
    _by_mode("here, x86_64", "us", "x86_64"),
    Row(
        "here, riscv64",
        "ns",
        {mode: _hit(bench.RECORDING, mode, "riscv64") for mode in (bench.STEPPED, bench.OPTIMIZED)},
        has_ratio=True,
    ),
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
            measured = list(_measured(row, options.hits, options.rounds))
            figures += measured
            lines[row.label] = row.line([figure.median for figure in measured])
    report(figures, options.json)
    if options.write:
        fill(options.pages, lines)


def _measured(row: Row, hits: int, rounds: int) -> Iterator[Distribution]:
    for name, measure in row.cells.items():
        yield Distribution(f"{row.label}: {name}", "ns", measure(hits, rounds))


if __name__ == "__main__":
    main()
