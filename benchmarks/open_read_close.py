"""Time of open, read and close of a probe's `hits` file, as ratio to a FUSE file system in C without library.

The client is pinned to a CPU, and all servers to the same one. The files take turns, batch by batch. A ratio
divides the time of a batch by that of the batch of passthrough.c in the same turn, in the directory of its
own `hits`. Each close(2) sends a FLUSH to that program. A second one has refused FLUSH, as kprobefs does.
With an absolute path, the host's kernel also walks the directories above the file. While a probe is armed,
each request is also a system call of the emulated kernel.
"""

from __future__ import annotations

import os
import time
from contextlib import chdir
from pathlib import Path

from c_program import passthrough
from common import Distribution, arguments, mounted, report

BELOW = Path("kprobes/stats/kprobes/reads")
"""Directory of `hits` in a mount, and in the C program, which has it, too."""
WARM_UP = 20
"""Number of rounds before a batch, since other servers have used the CPU's caches meanwhile."""
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
    samples: dict[str, list[float]] = {}
    base, bare = "passthrough in C", "passthrough in C, no FLUSH"
    with passthrough(cpu) as other, passthrough(cpu, "noflush") as without, mounted(options) as mount:
        (mount.path / "kprobe_events").write_text("p:reads vfs_read\n")
        enable = mount.path / "tracing/events/kprobes/reads/enable"
        ours = mount.path / BELOW

        def run(name: str, directory: Path, path: str = "hits") -> None:
            samples.setdefault(name, []).append(batch(directory, path, options.size))

        def turns(*more: tuple[str, Path, str]) -> None:
            for _ in range(options.batches):
                run(bare, without / BELOW)
                run(base, other / BELOW)
                for one in more:
                    run(*one)

        turns(
            ("procfs, /proc/version", Path("/proc"), "version"),
            ("from its directory", ours, "hits"),
            ("by absolute path", ours, str(ours / "hits")),
            (f"{base}, by absolute path", other, str(other / BELOW / "hits")),
        )
        enable.write_text("1")
        turns(("with vfs_read probed", ours, "hits"))
    figures = [Distribution(name, "us", tuple(each)) for name, each in samples.items()]
    for name, goal in GOALS.items():
        of_base = samples[base][options.batches :] if "probed" in name else samples[base][: options.batches]
        ratios = tuple(time_ / base_time for time_, base_time in zip(samples[name], of_base, strict=True))
        figures.append(Distribution(f"{name} : C", "ratio", ratios, target=goal))
    report(figures, options.json)


if __name__ == "__main__":
    main()
