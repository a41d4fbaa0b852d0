"""Comparison of all benchmarks between this tree and a checkout of another revision.

The other checkout needs an environment of its own: run `git worktree add DIR REVISION`, and `scripts/test
--setup-only` in DIR. The benchmarks of both trees alternate. A difference is noise if the ranges of the
medians of both trees overlap.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent.parent
BENCHMARKS = {
    "boot": (),
    "events": ("--counts", "100", "1000", "--rounds", "1", "--daemons", "2"),
    "first_line": ("--runs", "5"),
    "hit": (),
    "idle": (),
    "instructions": (),
    "open_read_close": (),
    "scratch": (),
    "vcpus": (),
}
"""Name of a benchmark that needs no distribution's kernel -> its options.

With these options, a run takes less than half a minute.
"""

Medians = dict[str, list[float]]
"""Name and unit of a figure -> its median in each round."""


class Compared(NamedTuple):
    """A figure that both trees have, with the medians of its rounds in each tree."""

    name: str
    before: Sequence[float]
    now: Sequence[float]

    @property
    def ratio(self) -> float | None:
        """The median in this tree divided by that of the other tree, or None if the latter is 0."""
        before = statistics.median(self.before)
        return statistics.median(self.now) / before if before else None

    @property
    def verdict(self) -> str:
        if min(self.now) > max(self.before):
            return "more"
        return "less" if max(self.now) < min(self.before) else "within noise"

    def line(self) -> str:
        """Return the figure's line of the table: for each tree the median and the range, and the ratio."""
        ratio = "-" if self.ratio is None else f"{self.ratio:.2f}"
        return f"{self.name:46} {_spread(self.before)} {_spread(self.now)} {ratio:>6}  {self.verdict}"


def _spread(samples: Sequence[float]) -> str:
    return f"{statistics.median(samples):9.3f} ({min(samples):.3f} to {max(samples):.3f})".ljust(34)


def figures(tree: Path, name: str, options: Sequence[str]) -> Mapping[str, float]:
    """Run a benchmark once in a tree, and return name and unit of each figure -> its median.

    Raises: CalledProcessError.
    """
    command = [str(tree / ".venv/bin/python"), f"benchmarks/{name}.py", "--json", *options]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True)
    return {f"{each['name']}, {each['unit']}": each["median"] for each in json.loads(done.stdout)}


def compared(other: Path, rounds: int, names: Sequence[str]) -> Iterator[Compared]:
    """Yield each figure that has the same name in both trees, after all rounds of its benchmark have run.

    `other`: directory of the other tree.
    """
    for name in names:
        before, now = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
        for _ in range(rounds):
            for tree, medians in ((other, before), (HERE, now)):
                for figure, median in figures(tree, name, BENCHMARKS[name]).items():
                    medians[figure].append(median)
        for figure in now:
            if figure in before:
                yield Compared(f"{name}: {figure}", before[figure], now[figure])


def main() -> None:
    """Compare the benchmarks that the command line selects, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tree", type=Path, help="the other checkout, with its .venv")
    parser.add_argument("--rounds", type=int, default=3, help="runs in each tree (default: 3)")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), metavar="NAME")
    options = parser.parse_args()
    if not (options.tree / ".venv/bin/python").exists():
        parser.error(f"{options.tree}: no .venv; run scripts/test --setup-only there")
    for figure in compared(options.tree.resolve(), options.rounds, options.only):
        print(figure.line(), flush=True)


if __name__ == "__main__":
    main()
