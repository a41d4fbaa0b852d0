"""Prove that every optimizable address can be patched while other CPUs run: python -m stress.exhaustion.

If the kernel has no optimizer, the probes at these addresses are only armed and disarmed.

Options: [--profile P] [--strategy S] [--tactic T] [--arch A] [--save-regs R] [--sites] [--states N]
[--part I/N] [--jobs N | --scheduler ADDRESS] [--results FILE].
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from emulated_kernel.arch.analysis.tactic import Tactic
from emulated_kernel.kprobes.profile import DEFAULT, PROFILES, STRATEGIES
from emulated_kernel.util.config import ARCHITECTURES
from kprobefs.common.errors import CliError
from kprobefs.measure.results_file import ResultsFile, finish
from stress.exhaustion.prover import Parts, Proved, Prover
from tests.progress import show_progress


def main(words: Sequence[str] | None = None) -> int:
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
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--jobs", type=int, default=1, help="number of processes")
    where.add_argument(
        "--scheduler", metavar="ADDRESS", help="prove on the workers of the Dask cluster with this scheduler"
    )
    parser.add_argument(
        "--results", metavar="FILE", help="keep what is finished in FILE; the next run only does the rest"
    )
    options = parser.parse_args(words)
    if options.sites and not PROFILES[options.profile].ftrace:
        parser.error(f"--sites: {options.profile} has no fentry sites; choose {DEFAULT}")
    if options.tactic and options.strategy is None:
        parser.error("--tactic: only a strategy has tactics; add --strategy extended")
    try:
        return _prove(options)
    except CliError as error:
        print(error, file=sys.stderr)
        return 1


def _prove(options: argparse.Namespace) -> int:
    proved = Proved(
        options.arch,
        options.profile,
        options.strategy,
        options.save_regs,
        options.sites,
        options.states,
        options.tactic,
    )
    first, step = map(int, options.part.split("/"))
    runs, problems, start = 0, [], time.monotonic()
    with ExitStack() as stack:
        file = None if options.results is None else stack.enter_context(ResultsFile(options.results))
        places = Prover(proved).places()[first::step]
        parts = Parts(proved, places)
        run = partial(parts.in_processes, options.jobs)
        if options.scheduler is not None:
            run = partial(parts.on_cluster, options.scheduler)
        done = 0
        for number, (more, found) in finish(len(parts), run, parts.digest, file):
            done += parts.places_in(number)
            runs += more
            problems += found
            show_progress(done, len(places), start, f"{runs} runs, {len(problems)} problems")
    print(f"{len(places)} places, {runs} runs, {len(problems)} problems")
    print(*problems[:20], sep="\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
