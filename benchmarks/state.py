"""What a hit's record costs with its buffers in a file, and without: python benchmarks/state.py [DIR...]."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from contextlib import ExitStack

from emulated_kernel.config import MachineConfig
from emulated_kernel.kernel import Kernel
from kprobefs.bench import FUNCTION, caller

HITS, ROUNDS = 20_000, 41


def kernel_in(directory: str | None, stack: ExitStack) -> Kernel:
    """A kernel with an optimized probe that records, its buffers in a file of `directory`, or in memory."""
    kernel = stack.enter_context(Kernel(MachineConfig(run_budget=60)))
    if directory is not None:
        with tempfile.TemporaryFile(dir=directory) as file:
            kernel.machine.records.keep_in(os.fdopen(os.dup(file.fileno()), "r+b", buffering=0))
    with kernel.lock:
        kernel.tracing.kprobe_events.write(f"p:turn {FUNCTION}+5 n=%di\n".encode())
        event = kernel.tracing.system.events.find("kprobes", "turn")
        assert event is not None
        kernel.trace_arrays.top.events.set_enabled(event, True)
        assert kernel.kprobes.optimizer is not None
        kernel.kprobes.optimizer.flush()
    return kernel


def main() -> None:
    """Rounds of all places in turn; the median of the differences to those without a file."""
    places: list[str | None] = [None, *(sys.argv[1:] or [tempfile.gettempdir(), "/dev/shm"])]
    with ExitStack() as stack:
        kernels = [kernel_in(place, stack) for place in places]
        rounds = [caller(kernel, HITS) for kernel in kernels]
        samples: list[list[float]] = [[] for _ in places]
        for _ in range(ROUNDS + 2):
            for run, found in zip(rounds, samples, strict=True):
                found.append(run())
    for place, found in zip(places, samples, strict=True):
        pairs = [mine - base for mine, base in zip(found[2:], samples[0][2:], strict=True)]
        cost, difference = statistics.median(found[2:]), statistics.median(pairs)
        print(f"{place or 'memory':20} {cost:8.1f} ns a hit, {difference:+6.1f} against memory")


if __name__ == "__main__":
    main()
