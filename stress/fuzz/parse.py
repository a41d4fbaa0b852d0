"""Fuzz parsers with texts and files: python -m stress.fuzz.parse [--inputs N] [--seed S] [TARGET...]."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import suppress
from random import Random

from emulated_kernel.util.errors import KernelError
from stress.fuzz.grammar import Mutator
from stress.fuzz.parsers import Target, targets
from stress.fuzz.report import Finding, Findings
from stress.fuzz.rules import TOKENS
from stress.fuzz.session import time_limit
from tests.progress import show_progress


class ParserFuzzer:
    """Runs one target on inputs that a seed and a number choose."""

    def __init__(self, target: Target, seed: int) -> None:
        self._target = target
        self._seed = seed
        self._mutator = Mutator(TOKENS)
        self.findings = Findings()
        self.refused = 0

    def run(self, number: int) -> None:
        """Run the target on the input with the number `number`; record an unexpected error as a finding."""
        data = self._target.input(Random(f"{self._seed}:{self._target.name}:{number}"), self._mutator)
        try:
            with time_limit():
                self._target.run(data)
        except KernelError as error:
            self.refused += 1
            if not error.errno or error.errno < 0:
                self.findings.add(error, (f"#{number}: {data[:300]!r}",))
        # Every other exception is a finding.
        except Exception as error:
            self.findings.add(error, (f"#{number}: {data[:300]!r}",))


def main() -> int:
    """Fuzz the named parsers, or all of them; return 1 if there is a finding."""
    known = targets()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000, help="number of inputs for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(known)}")
    parsed = parser.parse_args()
    found: list[Finding] = []
    for name in parsed.targets or known:
        if name not in known:
            parser.error(f"{name}: unknown target; use {', '.join(known)}")
        start = time.monotonic()
        fuzzer = ParserFuzzer(known[name], parsed.seed)
        done = 0
        # An interrupt ends the current target; the next one follows.
        with suppress(KeyboardInterrupt):
            for done in range(1, parsed.inputs + 1):
                fuzzer.run(done - 1)
                show_progress(done, parsed.inputs, start, f"{len(fuzzer.findings.all)} findings")
        found += fuzzer.findings.all
        seconds = time.monotonic() - start
        print(f"{name:<20} {done:>9} inputs, {fuzzer.refused:>9} refused, {seconds:.0f} s", flush=True)
    print(*found, sep="\n\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
