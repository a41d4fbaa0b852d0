"""Our rows of the tables in docs/sources.md, measured as `kprobefs bench hit` and `kinds` do, net.

`--write` puts the medians into the page. Run it on a machine that does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common import Distribution, arguments, report

from kprobefs import bench, bench_cpus, bench_kinds

PAGE = Path(__file__).resolve().parents[1] / "docs" / "sources.md"
BY_MODE = [
    (probe, mode)
    for probe in (bench.RECORDING, bench.RETURNING)
    for mode in (bench.STEPPED, bench.BOOSTED, bench.OPTIMIZED)
]
"""The columns of the tables of 2007 and 2009."""
Measure = Callable[[int, int], tuple[float, ...]]
"""Nanoseconds, of (hits, rounds)."""


@dataclass(frozen=True)
class Row:
    """One of ours, by what its line in the page begins with."""

    label: str
    unit: str
    cells: dict[str, Measure]
    has_ratio: bool = False
    """A last cell says how many times the second one the first one is."""

    def line(self, medians: list[float]) -> str:
        """The line of the page, of nanoseconds."""
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


def _kind(kind: str, arch: str) -> Measure:
    case = bench_kinds.KindCase("kprobes-2010", kind, arch)
    return lambda hits, rounds: tuple(1000 * us for us in bench_kinds.measure(case, hits, rounds).net)


def _by_mode(label: str, unit: str, arch: str) -> Row:
    return Row(label, unit, {f"{probe}, {mode}": _hit(probe, mode, arch) for probe, mode in BY_MODE})


ROWS = (
    *(
        Row(f"here, {arch}, `kprobes-2010`", "us", {kind: _kind(kind, arch) for kind in bench_kinds.KINDS})
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
)


def fill(page: str, lines: dict[str, str]) -> str:
    """The page with other lines, by what they begin with. Raises: SystemExit where it hasn't exactly one."""
    kept = page.splitlines()
    for label, line in lines.items():
        found = [number for number, old in enumerate(kept) if old.startswith(f"| {label} |")]
        if len(found) != 1:
            raise SystemExit(f"sources.py: {len(found)} rows {label!r} in the page, not one")
        kept[found[0]] = line
    return "\n".join(kept) + "\n"


def main() -> None:
    """Run, report, and fill in the page if that is wanted."""
    parser = arguments(__doc__)
    parser.add_argument("--hits", type=int, default=20000, help="hits a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", metavar="LABEL", choices=[row.label for row in ROWS], help="one row alone")
    parser.add_argument("--write", action="store_true", help="put the medians into the page")
    parser.add_argument("--page", type=Path, default=PAGE, help="(default: docs/sources.md)")
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
        options.page.write_text(fill(options.page.read_text(), lines))


def _measured(row: Row, hits: int, rounds: int) -> Iterator[Distribution]:
    for name, measure in row.cells.items():
        yield Distribution(f"{row.label}: {name}", "ns", measure(hits, rounds))


if __name__ == "__main__":
    main()
