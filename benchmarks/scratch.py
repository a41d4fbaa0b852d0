"""Bytes a second through scratch/, compared with a FUSE file system in C that passes one file through.

passthrough.c implements the FUSE protocol itself, so that it needs no headers of libfuse. It needs gcc and
root, and its file is in memory. The same client accesses both with the same blocks, without the page cache,
and alternates between them.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import Distribution, arguments, mounted, report, steady

SOURCE = Path(__file__).with_name("passthrough.c")
BLOCK = 128 << 10


@contextmanager
def passthrough(cpu: int) -> Iterator[Path]:
    """Mount passthrough.c for the length of the block, pinned to `cpu`, and yield its file."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        program, mount = Path(directory, "passthrough"), Path(directory, "mnt")
        subprocess.run(["gcc", "-O2", "-o", program, SOURCE], check=True)
        mount.mkdir()
        backing = Path(directory, "backing")
        with subprocess.Popen([program, backing, mount], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            if process.stdout.readline() != "mounted\n":
                raise SystemExit("passthrough: cannot mount; run it as root, with /dev/fuse")
            try:
                os.sched_setaffinity(process.pid, {cpu})
                yield mount / "file"
            finally:
                subprocess.run(["umount", mount], check=True)


def write(file: Path, size: int) -> float:
    """Write `size` bytes to a file, block by block, and return MB a second."""
    block = bytes(range(256)) * (BLOCK >> 8)
    descriptor = os.open(file, os.O_WRONLY)
    start = time.perf_counter()
    for offset in range(0, size, BLOCK):
        os.pwrite(descriptor, block, offset)
    took = time.perf_counter() - start
    os.close(descriptor)
    return size / took / 1e6


def read(file: Path, size: int) -> float:
    """Read `size` bytes from a file, block by block, and return MB a second."""
    descriptor = os.open(file, os.O_RDONLY)
    start = time.perf_counter()
    done = sum(len(os.pread(descriptor, BLOCK, offset)) for offset in range(0, size, BLOCK))
    took = time.perf_counter() - start
    os.close(descriptor)
    if done != size:
        raise SystemExit(f"{file}: read {done} bytes, not {size}")
    return size / took / 1e6


def measure(theirs: Path, ours: Path, size: int, rounds: int) -> list[Distribution]:
    """Write and read both files in turns."""
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
    with passthrough(cpu) as theirs, mounted(options) as mount:
        ours = mount.path / "scratch/file"
        ours.touch()
        figures = steady(options, measure, theirs, ours, size, options.rounds)
    report(figures, options)


if __name__ == "__main__":
    main()
