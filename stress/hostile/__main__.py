"""Damage each word of a guest's memory that the host reads.

python -m stress.hostile [builtin ...] [linux]
"""

from __future__ import annotations

import argparse
import logging
import random
import time
from collections import Counter
from collections.abc import Iterator

from stress.hostile import builtin, linux
from stress.hostile.corruption import Field, Watched, attack

Case = tuple[str, Field, int]
LINUX = "linux"


def main(argv: list[str] | None = None) -> None:
    """Run the program. Raises: an exception that a reader must not raise."""
    parser = argparse.ArgumentParser(prog="python -m stress.hostile", description=__doc__)
    parser.add_argument("kernels", nargs="*", help="architectures of the own kernel, or linux; default: all")
    parser.add_argument("--most", type=int, help="cases for each reader; default: all")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    # Each kind of damage is reported; here that is not news.
    logging.disable(logging.WARNING)
    for kernel in options.kernels or ["x86_64", "i386", "riscv64", LINUX]:
        _run(kernel, options.seed, options.most)


def _run(kernel: str, seed: int, most: int | None) -> None:
    since = time.monotonic()
    counts: Counter[str] = Counter()
    cases = _linux(seed, most) if kernel == LINUX else _builtin(kernel, seed, most)
    for name, _, _ in cases:
        counts[name] += 1
    print(f"{kernel}: {counts.total()} cases, {len(counts)} readers, {time.monotonic() - since:.0f} s")


def _builtin(arch: str, seed: int, most: int | None) -> Iterator[Case]:
    with builtin.victim(arch) as kernel:
        yield from attack(Watched(kernel.machine.memory), builtin.readers(kernel), random.Random(seed), most)


def _linux(seed: int, most: int | None) -> Iterator[Case]:
    with linux.victim() as engine:
        watched = linux.watched(engine)
        yield from attack(watched, linux.readers(engine), random.Random(seed), most)


if __name__ == "__main__":
    main()
