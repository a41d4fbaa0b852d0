"""Run time of --help, status and mount, with and without bytecode caches; target: 0.3 and 0.5 s.

`mount` is timed until the command returns. The mount is usable then.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

from common import PROGRAM, Distribution, arguments, report, steady

COMMANDS = ("--help", "status", "mount")
CACHED_TARGET = 0.3
UNCACHED_TARGET = 0.5


def seconds(command: str, directory: Path, environment: dict[str, str]) -> float:
    """Run a command, and return the seconds that it takes; if it mounts, unmount again."""
    words = [command, str(directory)] if command == "mount" else [command]
    start = time.perf_counter()
    # status fails if it finds a stale mount, which need not be the benchmark's.

    subprocess.run([*PROGRAM, *words], env=environment, stdout=subprocess.DEVNULL, check=command != "status")
    took = time.perf_counter() - start
    if command == "mount":
        subprocess.run([*PROGRAM, "umount", str(directory)], check=True)
    return took


def main() -> None:
    """Run the benchmark, and print its figures."""
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kprobefs-bench-") as made:
        base = Path(made)
        (base / "mnt").mkdir()
        own = {"KPROBEFS_RUNTIME_DIRECTORY": made, "KPROBEFS_PROBES_PATH": ""}
        os.environ |= own
        # One directory has the benchmark's own bytecode caches; nothing is written to the other.
        cached = {**os.environ, "PYTHONPYCACHEPREFIX": f"{made}/cache"}
        uncached = {**os.environ, "PYTHONPYCACHEPREFIX": f"{made}/none", "PYTHONDONTWRITEBYTECODE": "1"}
        kinds = [(command, cached) for command in COMMANDS] + [(command, uncached) for command in COMMANDS]
        for command in COMMANDS:
            seconds(command, base / "mnt", cached)

        def measure() -> list[Distribution]:
            # The commands alternate, so that a slow minute of the host affects all of them.
            samples = [
                [seconds(command, base / "mnt", environment) for command, environment in kinds]
                for _ in range(options.runs)
            ]
            return [
                Distribution(
                    f"{command}, {'cached' if environment is cached else 'uncached'}",
                    "s",
                    tuple(run[index] for run in samples),
                    CACHED_TARGET if environment is cached else UNCACHED_TARGET,
                )
                for index, (command, environment) in enumerate(kinds)
            ]

        figures = steady(options, measure)
    report(figures, options)


if __name__ == "__main__":
    main()
