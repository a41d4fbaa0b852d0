"""Writes odd things to every file: python -m stress.fuzz [--inputs N] [--seed S] [--file NAME...]."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import suppress

from stress.fuzz.fuzzer import Fuzzer, counts
from tests.progress import show_progress


def main() -> int:
    """Fuzz for a number of inputs; 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--file", nargs="+", default=(), help="names of files; options means all of options/")
    parsed = parser.parse_args()
    fuzzer = Fuzzer(parsed.seed, parsed.file)
    start = time.monotonic()
    done = 0
    # What was found so far is told when it is interrupted, too.
    with suppress(KeyboardInterrupt):
        for done in range(1, parsed.inputs + 1):
            fuzzer.run(parsed.first + done - 1)
            show_progress(done, parsed.inputs, start, f"{len(fuzzer.findings.all)} findings")
    fuzzer.close()
    print(*counts(fuzzer.answers), sep="\n")
    print(*fuzzer.findings.all, sep="\n\n")
    print(f"{done} inputs, {len(fuzzer.findings.all)} findings, {time.monotonic() - start:.0f} s")
    return int(bool(fuzzer.findings.all))


if __name__ == "__main__":
    sys.exit(main())
