"""Times of start-up, files and hits, and the memory, with a distribution's kernel and kprobefs's kprobes.

A hit makes a record with one argument. Its time is the time of the same calls with the probe, minus their
time without it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from common import PROGRAM, Distribution, Mount, arguments, mounted, report, steady
from first_line import first_line
from open_read_close import rounds

FUNCTION = "int_sqrt"
_ELEMENTS = 512
_CALLS = 8
"""Number of calls of sort() that one write makes; each call makes some thousand comparisons."""


def boot(image: str) -> float:
    """Mount a kernel with an empty boot cache; return the seconds until a command in the mount has run."""
    with tempfile.TemporaryDirectory(prefix="kprobefs-bench-") as made:
        environment = {**os.environ, "XDG_CACHE_HOME": made}
        start = time.perf_counter()
        subprocess.run([*PROGRAM, "run", "--image", image, "--", "true"], env=environment, check=True)
        return time.perf_counter() - start


def memory(mount: Mount) -> float:
    """Return the resident memory of the daemon in MiB."""
    status = Path(f"/proc/{mount.daemon}/status").read_text(encoding="utf-8")
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


def files(mount: Mount, batches: int, size: int) -> tuple[float, ...]:
    """Return for each batch the mean microseconds to open, read and close a file in scratch/.

    A batch has `size` rounds.
    """
    place = mount.path / "scratch/file"
    place.write_text("hello\n", encoding="ascii")
    path = os.fspath(place)
    rounds(path, size)
    return tuple(rounds(path, size) for _ in range(batches))


def hit(mount: Mount, batches: int, *, is_optimized: bool) -> tuple[float, ...]:
    """Return for each batch the mean microseconds of a hit in the comparison function of sort().

    `is_optimized`: whether kprobes may be optimized.
    """
    switch = mount.path / "sysctl/debug/kprobes-optimization"
    switch.write_text(f"{is_optimized:d}\n", encoding="ascii")
    call = mount.path / "machine/call"
    enable = mount.path / "tracing/events/kprobes/bench/enable"
    _, address = _symbol(mount, FUNCTION)
    place = _zeros(mount)
    line = f"sort {place:#x} {_ELEMENTS} 8 {address:#x} 0\n" * _CALLS
    (mount.path / "kprobe_events").write_text(f"p:bench {FUNCTION} x=$arg1\n", encoding="ascii")
    count = mount.path / "kprobes/stats/kprobes/bench/hits"
    jump = mount.path / "kprobes/stats/kprobes/bench/optimized"

    def timed() -> float:
        start = time.perf_counter()
        call.write_text(line, encoding="ascii")
        return time.perf_counter() - start

    samples = []
    for _ in range(batches + 1):
        enable.write_text("0", encoding="ascii")
        without = timed()
        before = int(count.read_text(encoding="ascii"))
        enable.write_text("1", encoding="ascii")
        if is_optimized:
            # The optimizer would write the jump some jiffies later. A probe on an fentry site has no jump.
            with suppress(OSError):
                jump.write_text("1", encoding="ascii")
        added = timed() - without
        samples.append(added / (int(count.read_text(encoding="ascii")) - before) * 1e6)
    enable.write_text("0", encoding="ascii")
    # The first batch also compiles the handler.
    return tuple(samples[1:])


def _symbol(mount: Mount, *names: str) -> tuple[str, int]:
    """Return the name and address of the kernel's first symbol that has one of the names.

    Raises: SystemExit (the kernel has none of these symbols).
    """
    for line in (mount.path / "machine/kallsyms").read_text(encoding="utf-8").splitlines():
        address, _, symbol = line.split()[:3]
        if symbol in names:
            return symbol, int(address, 16)
    raise SystemExit(f"{names[0]}: the kernel has no such symbol")


def _zeros(mount: Mount) -> int:
    """Allocate zeroed memory in the kernel for sort(), and return its address."""
    call = mount.path / "machine/call"
    # Since Linux 6.10, __kmalloc is a macro.
    function, _ = _symbol(mount, "__kmalloc", "__kmalloc_noprof")
    call.write_text(f"{function} {_ELEMENTS * 8} 0xdc0\n", encoding="ascii")
    return int(call.read_text(encoding="ascii").split()[2], 16)


class Measured(NamedTuple):
    """Figures of a mount: microseconds of its files and hits, and MiB of its daemon's memory."""

    files: tuple[float, ...]
    stepped: tuple[float, ...]
    optimized: tuple[float, ...]
    memory: float


def _measured(options: argparse.Namespace, *of_mount: str) -> Measured:
    with mounted(options, *of_mount) as mount:
        return Measured(
            files(mount, options.batches, 100),
            hit(mount, options.batches, is_optimized=False),
            hit(mount, options.batches, is_optimized=True),
            memory(mount),
        )


def _of_mounts(options: argparse.Namespace, image: tuple[str, str]) -> list[Distribution]:
    measured = [_measured(options, *of_mount) for of_mount in ((), image)]
    kernels = ("our own kernel", "the distribution's")
    figures = []
    for name, found, target in zip(kernels, measured, (None, 150.0), strict=True):
        figures.append(Distribution(f"open, read, close, {name}", "us", found.files, target))
    for name, found in zip(kernels, measured, strict=True):
        figures.append(Distribution(f"a stepped hit, {name}", "us of a hit", found.stepped, target=0.2))
        figures.append(Distribution(f"an optimized hit, {name}", "us of a hit", found.optimized, target=0.1))
    for name, found in zip(kernels, measured, strict=True):
        figures.append(Distribution(f"memory, {name}", "MiB", (found.memory,), target=120))
    return figures


def main() -> None:
    """Run the benchmark, and print its figures."""
    parser = arguments(__doc__)
    parser.add_argument("--image", default="host", help="a vmlinuz or Debian package (default: host)")
    parser.add_argument("--runs", type=int, default=10, help="number of starts (default: 10)")
    parser.add_argument(
        "--boots", type=int, default=3, help="number of starts with an empty cache (default: 3)"
    )
    parser.add_argument(
        "--batches", type=int, default=20, help="number of batches of files and hits (default: 20)"
    )
    options = parser.parse_args()
    image = ("--image", options.image)
    first_line(*image)

    def starts() -> list[Distribution]:
        samples = tuple(first_line(*image) for _ in range(options.runs))
        return [Distribution("start to first trace line", "s", samples, target=0.35)]

    def boots() -> list[Distribution]:
        samples = tuple(boot(options.image) for _ in range(options.boots))
        return [Distribution("first start, with its boot", "s", samples, target=3)]

    figures = steady(options, starts) + steady(options, boots)
    figures += steady(options, _of_mounts, options, image)
    report(figures, options)


if __name__ == "__main__":
    main()
