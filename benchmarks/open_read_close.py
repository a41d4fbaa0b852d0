"""Time of open, read and close of a probe's `hits` file, compared with procfs; target: 60 us a round.

The client is pinned to a CPU. With an absolute path, each round also looks up the five directories above the
file, because lookups are not cached. While a probe is armed, each request is also a system call of the
emulated kernel.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from common import Distribution, arguments, mounted, report, steady


def rounds(path: Path, batches: int, size: int) -> tuple[float, ...]:
    """Return for each batch of `size` rounds the mean microseconds of a round (open, one read, close)."""
    return tuple(_batch(os.fspath(path), size) for _ in range(batches))


def _batch(path: str, size: int) -> float:
    open_, read, close = os.open, os.read, os.close
    start = time.perf_counter_ns()
    for _ in range(size):
        fd = open_(path, os.O_RDONLY)
        read(fd, 4096)
        close(fd)
    return (time.perf_counter_ns() - start) / size / 1000


def main() -> None:
    """Run the benchmark, and print its figures."""
    parser = arguments(__doc__)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--size", type=int, default=200, help="rounds a batch")
    options = parser.parse_args()
    with mounted(options) as mount:
        (mount.path / "kprobe_events").write_text("p:reads vfs_read\n")
        hits = mount.path / "kprobes/stats/kprobes/reads/hits"
        rounds(hits, 2, options.size)

        def row(name: str, file: Path, target: float | None = None) -> list[Distribution]:
            def measure() -> list[Distribution]:
                return [Distribution(name, "us", rounds(file, options.batches, options.size), target)]

            return steady(options, measure)

        figures = row("procfs, /proc/version", Path("/proc/version"))
        with contextlib.chdir(hits.parent):
            figures += row("hits, from its directory", Path("hits"), target=60)
            figures += row("hits, by absolute path", hits)
            (mount.path / "tracing/events/kprobes/reads/enable").write_text("1")
            figures += row("hits, with vfs_read probed", Path("hits"))
    report(figures, options)


if __name__ == "__main__":
    main()
