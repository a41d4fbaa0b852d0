"""Execute an arm64 kernel's instructions in place and relocated: python -m stress.linux.relocations.

Each different instruction that can be in a detour is executed in both ways from the same random state. The
registers, memory, next address and exceptions must be the same. The environment variable KPROBEFS_DEBIAN has
to name a kernel for arm64, such as linux-image-cloud-arm64/trixie.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from errno import ERANGE

from emulated_kernel.arch.arm64.insn import words_of
from emulated_kernel.arch.arm64.relocate import relocation_of
from emulated_kernel.util.errors import KernelError
from tests.arch.arm64.moved import may_move, mover
from tests.guests.linux.probing import kernel


def words_of_text() -> set[int]:
    """Return the different instructions of the kernel's text that can be in a detour."""
    start, end = kernel().text
    return {word for word in words_of(kernel().read(start, end - start)) if may_move(word)}


def main(argv: list[str] | None = None) -> int:
    """Run the program; return 1 if an instruction differs."""
    parser = argparse.ArgumentParser(prog="python -m stress.linux.relocations", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--part", type=int, default=1, help="execute an Nth of the instructions (default: all)"
    )
    options = parser.parse_args(argv)
    words = sorted(words_of_text())
    random.Random(options.seed).shuffle(words)
    counts: Counter[str] = Counter()
    differences = []
    with mover(options.seed) as moving:
        for word in words[:: options.part]:
            try:
                difference = moving.differs(word)
            except KernelError as error:
                # Data in the text can look like a branch that leads far away.
                if error.errno != ERANGE:
                    raise
                counts["out of reach"] += 1
                continue
            if difference:
                differences.append(difference)
            counts[relocation_of(word).name.lower()] += 1
    print(f"{len(words)} different instructions, {counts.total()} executed: {dict(counts.most_common())}")
    for difference in differences:
        print(difference)
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
