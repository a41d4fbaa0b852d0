"""Time of open, read and close of a probe's file `hits`, divided by that of a FUSE file system in C.

The C program, passthrough.c, uses no library and has a file `hits` at the same path. The client and all
servers are pinned to the same CPU. The files take turns, batch by batch. A ratio divides the time of a batch
by the time of the C program's batch in the same turn: there, the client opens `hits` from the file's own
directory, and each close(2) sends a FLUSH. A second instance of the program, which is shown but never
divides, refuses FLUSH, as kprobefs does. With an absolute path, the host's kernel also walks the directories
above the file. While a probe is armed, each request is also a system call of the emulated kernel.
"""

from __future__ import annotations

import os
import time
from contextlib import chdir
from pathlib import Path

from c_program import passthrough
from common import Distribution, arguments, mounted, report, steady

BELOW = Path("kprobes/stats/kprobes/reads")
"""Directory of the file `hits`, relative to a mount of kprobefs or of the C program."""
WARM_UP = 20
"""Number of rounds before each batch, because other servers have used the CPU's caches in the meantime."""
Row = tuple[str, Path, str]
"""Name of a row, the working directory, and the path of the file."""
GOALS = {"from its directory": 1.4, "by absolute path": 1.6, "with vfs_read probed": 2.5}


def batch(directory: Path, path: str, size: int) -> float:
    """Return the mean microseconds of a round of open, one read and close in a batch of `size` rounds."""
    with chdir(directory):
        rounds(path, WARM_UP)
        return rounds(path, size)


def rounds(path: str, size: int) -> float:
    """Do `size` rounds of open, one read and close, and return their mean microseconds."""
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
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--size", type=int, default=200, help="rounds a batch")
    options = parser.parse_args()
    cpu = options.client_cpu if options.client_cpu is not None else min(os.sched_getaffinity(0))
    with passthrough(cpu) as other, passthrough(cpu, "noflush") as without, mounted(options) as mount:
        (mount.path / "kprobe_events").write_text("p:reads vfs_read\n")
        ours = mount.path / BELOW
        base: Row = ("passthrough in C", other / BELOW, "hits")
        bare: Row = ("passthrough in C, no FLUSH", without / BELOW, "hits")

        def turns(*rows: Row) -> list[Distribution]:
            samples: dict[str, list[float]] = {}
            for _ in range(options.batches):
                for name, directory, path in (base, bare, *rows):
                    samples.setdefault(name, []).append(batch(directory, path, options.size))
            figures = [Distribution(name, "us", tuple(each)) for name, each in samples.items()]
            for name, goal in GOALS.items():
                if name in samples:
                    pairs = zip(samples[name], samples[base[0]], strict=True)
                    ratios = tuple(time_ / of_base for time_, of_base in pairs)
                    figures.append(Distribution(f"{name} : C", "ratio", ratios, target=goal))
            return figures

        figures = steady(
            options,
            turns,
            ("procfs, /proc/version", Path("/proc"), "version"),
            ("from its directory", ours, "hits"),
            ("by absolute path", ours, str(ours / "hits")),
            ("passthrough in C, by absolute path", other, str(other / BELOW / "hits")),
        )
        (mount.path / "tracing/events/kprobes/reads/enable").write_text("1")
        # The rows of the C program are shown once.
        figures += steady(options, turns, ("with vfs_read probed", ours, "hits"))[2:]
    report(figures, options)


if __name__ == "__main__":
    main()
