"""Write random data to every file: python -m stress.fuzz [--inputs N] [--seed S] [--file NAME...]."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import suppress

from stress.fuzz.fuzzer import Fuzzer, counts
from tests.progress import show_progress


def main() -> int:
    """Write a number of inputs; return 1 if there is a finding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--file",
        nargs="+",
        default=(),
        help="only files with these names; `options` means all files of options/",
    )
    parsed = parser.parse_args()
    fuzzer = Fuzzer(parsed.seed, parsed.file)
    start = time.monotonic()
    done = 0
    # An interrupt ends the loop; the findings so far are printed.
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
