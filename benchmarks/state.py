"""Time of a call with a recorded hit, with the ring buffers in memory and in a file as with --state.

The probe is optimized. The figures are CPU time.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from common import Distribution, arguments, report, steady

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from kprobefs.measure.bench import FUNCTION, caller

WARM_UP = 2
"""Number of rounds at the beginning that are not counted."""


def kernel_in(directory: str | None, stack: ExitStack) -> Kernel:
    """Start a kernel with an optimized probe that records its hits, and return the kernel.

    The ring buffers are in a file in `directory`, or in memory if `directory` is None.
    """
    kernel = stack.enter_context(Kernel(MachineConfig(run_budget=60)))
    if directory is not None:
        with tempfile.TemporaryFile(dir=directory) as file:
            kernel.machine.records.keep_in(os.fdopen(os.dup(file.fileno()), "r+b", buffering=0))
    with kernel.lock:
        kernel.tracing.kprobe_events.write(f"p:turn {FUNCTION}+5 n=%di\n".encode())
        event = kernel.tracing.system.events.find("kprobes", "turn")
        assert event is not None
        kernel.trace_arrays.top.events.set_enabled(event, True)
        kernel.wait_for_kprobe_optimizer()
    return kernel


def measure(places: Sequence[str], runs: Sequence[Callable[[], float]], rounds: int) -> list[Distribution]:
    """Measure the hits of all kernels in turns. `runs`: functions that return the nanoseconds of a hit.

    The first of `runs` has its ring buffers in memory, and the others have them in the directories `places`.

    The differences are relative to the hit with ring buffers in memory, in the same round.
    """
    samples: list[list[float]] = [[] for _ in runs]
    for number in range(WARM_UP + rounds):
        for run, found in zip(runs, samples, strict=True):
            cost = run()
            if number >= WARM_UP:
                found.append(cost)
    figures = [
        Distribution(f"a hit, {place}", "ns", tuple(found))
        for place, found in zip(("memory", *places), samples, strict=True)
    ]
    for place, found in zip(places, samples[1:], strict=True):
        more = tuple(mine - base for mine, base in zip(found, samples[0], strict=True))
        figures.append(Distribution(f"against memory, {place}", "ns more", more))
    return figures


def main() -> None:
    """Run the benchmark, and print its figures."""
    parser = arguments(__doc__)
    parser.add_argument("places", metavar="DIR", nargs="*", default=[tempfile.gettempdir(), "/dev/shm"])
    parser.add_argument("--hits", type=int, default=20_000, help="hits a round")
    parser.add_argument("--rounds", type=int, default=41)
    options = parser.parse_args()
    places: list[str | None] = [None, *options.places]
    with ExitStack() as stack:
        rounds = [caller(kernel_in(place, stack), options.hits) for place in places]
        figures = steady(options, measure, options.places, rounds, options.rounds)
    report(figures, options)


if __name__ == "__main__":
    main()
