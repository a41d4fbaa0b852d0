"""Common parts of the benchmarks: a mount pinned to CPUs, distributions, and output as a table or JSON."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout that contains this benchmark. All benchmarks measure its code."""
PROGRAM = (sys.executable, "-P", "-m", "kprobefs")
"""Command that runs the kprobefs program of ROOT, wherever kprobefs is installed."""
WIDE = 0.2
"""Maximum spread with which a row of the table is not measured again; see Distribution.spread."""
_PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONHOME")
"""Environment variables that say where Python's modules are; the benchmarks keep them."""

# The import of this module makes ROOT the first directory of modules, here and in the commands.
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


@dataclass(frozen=True)
class Distribution:
    """Samples of one figure, all in `unit`."""

    name: str
    unit: str
    samples: tuple[float, ...]
    target: float | None = None
    """The maximum median that meets the project's goal; None if there is no goal."""
    runs: int = 1
    """Number of times that the row was measured; the samples are those of the run with the least spread."""

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def is_noise(self) -> bool:
        """Whether the spread of the samples is so large that the median says nothing."""
        low = self.quantile(1)
        return low < 0 or low == 0 < max(self.samples)

    @property
    def spread(self) -> float:
        """The distance between the 10th and the 90th percentile, divided by the median; 0 for noise."""
        width = self.quantile(9) - self.quantile(1)
        return width / self.median if width and not self.is_noise else 0.0

    def quantile(self, tenth: int) -> float:
        """Return the decile number `tenth`, 1 to 9, interpolated between the two nearest samples.

        Rounding never puts the result outside of the range of the samples.
        """
        ordered = sorted(self.samples)
        whole, tenths = divmod(tenth * (len(ordered) - 1), 10)
        low, high = ordered[whole], ordered[min(whole + 1, len(ordered) - 1)]
        return low + (high - low) * tenths / 10

    def as_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "p10": self.quantile(1),
            "p90": self.quantile(9),
            "min": min(self.samples),
            "samples": len(self.samples),
            "target": self.target,
            "runs": self.runs,
        }


@dataclass(frozen=True)
class Mount:
    """A running mount: its directory, and the process ID of its daemon."""

    path: Path
    daemon: int


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks take.

    Also remove Python's environment variables that change the speed of programs. With
    PYTHONDONTWRITEBYTECODE, for example, no program that the benchmark starts would have a bytecode cache.
    """
    from kprobefs.measure.host_load import HostLoad

    for name in list(os.environ):
        if name.startswith("PYTHON") and name not in _PYTHON_VARIABLES:
            del os.environ[name]
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--client-cpu", type=int, metavar="N", help="pin this process to CPU N")
    parser.add_argument("--daemon-cpu", type=int, metavar="N", help="pin the daemon (default: as the client)")
    parser.add_argument(
        "--repeats", type=int, default=2, metavar="N", help="measure a row of wide spread again, N times"
    )
    parser.set_defaults(host=HostLoad())
    return parser


def steady(
    options: argparse.Namespace, measure: Callable[..., Sequence[Distribution]], *given: object
) -> list[Distribution]:
    """Call `measure` with `given`, and call it again while one of its rows has a wide spread.

    `options.repeats` limits the repetitions. A row with a wide spread gets the samples of the run with the
    least spread. The other rows keep their samples.
    """
    figures = list(measure(*given))
    for run in range(options.repeats):
        if not any(figure.spread > WIDE for figure in figures):
            break
        figures = [
            replace(min(old, new, key=lambda each: each.spread), runs=run + 2) if old.spread > WIDE else old
            for old, new in zip(figures, measure(*given), strict=True)
        ]
    return figures


def report(figures: Sequence[Distribution], options: argparse.Namespace) -> None:
    """Print the figures and the load of the host; with JSON, the load goes to standard error.

    A figure's ratio is its median divided by that of the first figure of its unit.
    """
    if options.json:
        print(json.dumps([figure.as_dict() for figure in figures], indent=2))
        print(options.host.line(), file=sys.stderr)
        return
    print(f"{'':34} {'median':>9} {'p10':>9} {'p90':>9} {'ratio':>7}  goal")
    for figure in figures:
        base = next(other for other in figures if other.unit == figure.unit)
        ratio = f"{figure.median / base.median:.2f}" if base.median else "-"
        print(
            f"{figure.name + ', ' + figure.unit:34} {figure.median:9.3f} {figure.quantile(1):9.3f} "
            f"{figure.quantile(9):9.3f} {ratio:>7}  {_remark(figure)}"
        )
    print(options.host.line())


def _remark(figure: Distribution) -> str:
    if figure.is_noise:
        return "noise"
    goal = "-" if figure.target is None else f"{figure.target:g}"
    return goal if figure.spread <= WIDE else f"{goal}  wide, the best of {figure.runs} runs"


@contextmanager
def mounted(options: argparse.Namespace, *of_mount: str) -> Iterator[Mount]:
    """Mount kprobefs during the `with` block, with client and daemon pinned to the CPUs in `options`.

    `of_mount`: further options of `kprobefs mount`. By default both share one CPU, because a wake-up across
    CPUs costs more than the work that is measured.
    """
    holder = 'printf "%s\\n" "$KPROBEFS"; exec cat'
    client_cpu = options.client_cpu if options.client_cpu is not None else min(os.sched_getaffinity(0))
    daemon_cpu = options.daemon_cpu if options.daemon_cpu is not None else client_cpu
    with subprocess.Popen(
        [*PROGRAM, "run", *of_mount, "--", "sh", "-c", holder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        path = Path(process.stdout.readline().rstrip("\n"))
        mount = Mount(path, _daemon_below(process.pid))
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {client_cpu})
        _pin_threads(mount.daemon, daemon_cpu)
        try:
            yield mount
        finally:
            os.sched_setaffinity(0, before)
            process.stdin.close()
    if process.returncode:
        raise SystemExit(f"kprobefs run ended with status {process.returncode}")


def _pin_threads(pid: int, cpu: int) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), {cpu})


def _daemon_below(pid: int) -> int:
    """Return the pid of the process that has /dev/fuse open, among `pid` and its descendants."""
    family = [pid]
    while family:
        candidate = family.pop()
        if _serves_fuse(candidate):
            return candidate
        for children in Path(f"/proc/{candidate}/task").glob("*/children"):
            family.extend(int(child) for child in children.read_text().split())
    raise SystemExit("kprobefs run: no mount was made; none of its processes has /dev/fuse open")


def _serves_fuse(pid: int) -> bool:
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        # A descriptor can be closed between the listing and the readlink().
        with suppress(OSError):
            if os.readlink(fd) == "/dev/fuse":
                return True
    return False
