"""Time from the start of `kprobefs run` to the first readable trace line; goal: a quarter of a second."""

from __future__ import annotations

import subprocess
import time

from common import PROGRAM, Distribution, arguments, report, steady

PROBE_AND_HIT = """
cd "$KPROBEFS" &&
echo 'p:reads vfs_read count=$arg3' > kprobe_events &&
echo 1 > tracing/events/kprobes/reads/enable &&
echo hello > scratch/greeting &&
cat scratch/greeting > /dev/null &&
grep -m 1 'reads: ' tracing/trace
"""


def first_line(*of_mount: str) -> float:
    """Start kprobefs, and return the seconds until the trace line is read; unmounting is not counted.

    `of_mount`: further options of `kprobefs run`.
    """
    start = time.perf_counter()
    command = [*PROGRAM, "run", *of_mount, "--", "sh", "-c", PROBE_AND_HIT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        took = time.perf_counter() - start
    if "reads: " not in line:
        raise SystemExit(f"kprobefs run: expected a trace line, not {line!r}")
    return took


def measure(runs: int) -> list[Distribution]:
    """Measure first_line() `runs` times."""
    samples = tuple(first_line() for _ in range(runs))
    return [Distribution("start to first trace line", "s", samples, target=0.25)]


def main() -> None:
    """Run the benchmark, and print its figures."""
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    # Fill the page cache: only the first run after the host's boot would find it empty.
    first_line()
    report(steady(options, measure, options.runs), options)


if __name__ == "__main__":
    main()
