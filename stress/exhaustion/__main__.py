"""Prove that every optimizable address can be patched while other CPUs run: python -m stress.exhaustion.

In a kernel without jumps, the same addresses only get breakpoints.

Options: [--profile P] [--strategy S] [--tactic T] [--arch A] [--save-regs R] [--sites] [--states N]
[--part I/N] [--jobs N].
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import tests.own_thread  # noqa: F401 - for kernels in this process
from emulated_kernel.arch.analysis.tactic import Tactic
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import DEFAULT, PROFILES, STRATEGIES
from emulated_kernel.util.config import ARCHITECTURES, MachineConfig
from stress.exhaustion.compiled import CompiledProof
from stress.exhaustion.proof import Proof
from stress.exhaustion.sites import SiteProof, fentry_sites
from tests.kprobes.optimizer.conftest import Probed
from tests.kprobes.optimizer.regions import optimizable, refused_by_linux
from tests.progress import show_progress

Where = tuple[str, int, int]


class Prover:
    """A kernel of this process, and the proof that runs on it."""

    def __init__(self, options: argparse.Namespace) -> None:
        is_compiled = options.save_regs is not None
        config = MachineConfig(
            arch=options.arch,
            profile=options.profile,
            strategy=options.strategy,
            save_regs=options.save_regs,
        )
        kernel = Kernel(config)
        kind = SiteProof if options.sites else CompiledProof if is_compiled else Proof
        only_tactics = options.strategy is not None
        self._find = fentry_sites if options.sites else refused_by_linux if only_tactics else optimizable
        self._tactic = options.tactic and Tactic[options.tactic.upper()]
        self._proof = kind(Probed(kernel), options.states)

    def places(self) -> list[Where]:
        """Return (symbol, offset, address) of all places that are to be proved."""
        probed = self._proof.probed
        found = self._find(probed)
        if self._tactic is None:
            return list(found)
        return [place for place in found if self._tactic in probed.region(place[2]).tactics]

    def check(self, place: Where) -> tuple[int, list[str]]:
        """Prove a place, and return the number of runs and the problems."""
        proof = self._proof
        runs, known = proof.runs, len(proof.problems)
        proof.check(place)
        return proof.runs - runs, proof.problems[known:]


_prover: Prover
"""The prover of this worker process."""


def _boot(options: argparse.Namespace) -> None:
    global _prover
    _prover = Prover(options)


def _places() -> list[Where]:
    return _prover.places()


def _check(place: Where) -> tuple[int, list[str]]:
    return _prover.check(place)


def main() -> int:
    """Check every optimizable address of the image; return 1 if there is a problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", choices=PROFILES, default=DEFAULT)
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        help="prove the places that this optimization policy adds to those of the profile",
    )
    parser.add_argument(
        "--tactic",
        choices=[tactic.name.lower() for tactic in Tactic],
        help="with --strategy, prove only the places whose jump needs this tactic",
    )
    parser.add_argument("--arch", choices=ARCHITECTURES, default="x86_64")
    parser.add_argument(
        "--save-regs", choices=["live", "all"], help="compile the handlers, and save these registers"
    )
    parser.add_argument(
        "--sites", action="store_true", help="prove fentry sites instead of optimizable places"
    )
    parser.add_argument("--states", type=int, default=1, help="register states for each place, at most 3")
    parser.add_argument(
        "--part", default="0/1", metavar="I/N", help="only every Nth place, beginning with number I"
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    options = parser.parse_args()
    if options.sites and not PROFILES[options.profile].ftrace:
        parser.error(f"--sites: {options.profile} has no fentry sites; choose {DEFAULT}")
    if options.tactic and options.strategy is None:
        parser.error("--tactic: only a strategy has tactics; add --strategy extended")
    first, step = map(int, options.part.split("/"))
    runs, problems, start = 0, [], time.monotonic()
    with ProcessPoolExecutor(options.jobs, initializer=_boot, initargs=(options,)) as pool:
        places = pool.submit(_places).result()[first::step]
        for number, (more, found) in enumerate(pool.map(_check, places, chunksize=8), 1):
            runs += more
            problems += found
            show_progress(number, len(places), start, f"{runs} runs, {len(problems)} problems")
    print(f"{len(places)} places, {runs} runs, {len(problems)} problems")
    print(*problems[:20], sep="\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
