"""Time of a call with a recorded hit, with the ring buffers in memory and in a file as with --state.

The probe is optimized. The figures are CPU time.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack

from common import Distribution, arguments, report

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from kprobefs.measure.bench import FUNCTION, caller

WARM_UP = 2
"""Number of first rounds that are not counted."""


def kernel_in(directory: str | None, stack: ExitStack) -> Kernel:
    """Start a kernel with an optimized probe that records its hits, and return the kernel.

    The ring buffers are in a file in `directory`, or in memory if that is None.
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


def main() -> None:
    """Run the benchmark with all directories in turn, and print its figures.

    The differences are those to the ring buffers in memory, in the same round.
    """
    parser = arguments(__doc__)
    parser.add_argument("places", metavar="DIR", nargs="*", default=[tempfile.gettempdir(), "/dev/shm"])
    parser.add_argument("--hits", type=int, default=20_000, help="hits a round")
    parser.add_argument("--rounds", type=int, default=41)
    options = parser.parse_args()
    places: list[str | None] = [None, *options.places]
    with ExitStack() as stack:
        rounds = [caller(kernel_in(place, stack), options.hits) for place in places]
        samples: list[list[float]] = [[] for _ in places]
        for number in range(WARM_UP + options.rounds):
            for run, found in zip(rounds, samples, strict=True):
                cost = run()
                if number >= WARM_UP:
                    found.append(cost)
    figures = [
        Distribution(f"a hit, {place or 'memory'}", "ns", tuple(found))
        for place, found in zip(places, samples, strict=True)
    ]
    for place, found in zip(options.places, samples[1:], strict=True):
        more = tuple(mine - base for mine, base in zip(found, samples[0], strict=True))
        figures.append(Distribution(f"against memory, {place}", "ns more", more))
    report(figures, options.json)


if __name__ == "__main__":
    main()
