"""Bytes per second through scratch/, compared with a FUSE file system in C that passes one file through.

The file of passthrough.c is in memory. The same client accesses both file systems with the same blocks,
without the page cache, and alternates between them. The ratios divide the median of scratch/ by that of the C
program; the goal is 0.6.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from c_program import passthrough
from common import Distribution, arguments, mounted, report, steady

BLOCK = 128 << 10


def write(file: Path, size: int) -> float:
    """Write `size` bytes to a file, block by block, and return the speed in MB per second."""
    block = bytes(range(256)) * (BLOCK >> 8)
    descriptor = os.open(file, os.O_WRONLY)
    start = time.perf_counter()
    for offset in range(0, size, BLOCK):
        os.pwrite(descriptor, block, offset)
    took = time.perf_counter() - start
    os.close(descriptor)
    return size / took / 1e6


def read(file: Path, size: int) -> float:
    """Read `size` bytes from a file, block by block, and return the speed in MB per second."""
    descriptor = os.open(file, os.O_RDONLY)
    start = time.perf_counter()
    done = sum(len(os.pread(descriptor, BLOCK, offset)) for offset in range(0, size, BLOCK))
    took = time.perf_counter() - start
    os.close(descriptor)
    if done != size:
        raise SystemExit(f"{file}: read {done} bytes, not {size}")
    return size / took / 1e6


def measure(theirs: Path, ours: Path, size: int, rounds: int) -> list[Distribution]:
    """Measure the speed of writes and reads of `size` bytes, with both files in turns."""
    samples: dict[str, list[float]] = {}
    for _ in range(rounds):
        for what, action in (("write", write), ("read", read)):
            for whose, file in (("passthrough in C", theirs), ("scratch/", ours)):
                samples.setdefault(f"{what}, {whose}", []).append(action(file, size))
    return [Distribution(name, "MB/s", tuple(each)) for name, each in samples.items()]


def main() -> None:
    """Run the benchmark, and print its figures."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--mib", type=int, default=8, help="size of the file (default: 8)")
    options = parser.parse_args()
    size = options.mib << 20
    cpu = options.client_cpu if options.client_cpu is not None else min(os.sched_getaffinity(0))
    with passthrough(cpu) as other, mounted(options) as mount:
        theirs = other / "file"
        ours = mount.path / "scratch/file"
        ours.touch()

        def turns() -> list[Distribution]:
            samples: dict[str, list[float]] = {}
            for _ in range(options.rounds):
                for what, action in (("write", write), ("read", read)):
                    for whose, file in (("passthrough in C", theirs), ("scratch/", ours)):
                        samples.setdefault(f"{what}, {whose}", []).append(action(file, size))
            figures = [Distribution(name, "MB/s", tuple(each)) for name, each in samples.items()]
            for what in ("write", "read"):
                pairs = zip(samples[f"{what}, scratch/"], samples[f"{what}, passthrough in C"], strict=True)
                ratios = tuple(of_ours / of_theirs for of_ours, of_theirs in pairs)
                figures.append(Distribution(f"{what}, scratch/ : C", "ratio", ratios))
            return figures

        figures = steady(options, turns)
    report(figures, options)


if __name__ == "__main__":
    main()
