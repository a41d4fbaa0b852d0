"""What a hooked return costs on each shadow stack, net of the unprobed call, and what it takes of memory.

The guest calls int_sqrt(0) in a loop, while as many other tasks as asked for stand in the same function.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from common import Distribution, arguments, report

from emulated_kernel.config import MachineConfig
from emulated_kernel.kernel import Kernel
from emulated_kernel.kprobes.kretprobe import Kretprobe
from emulated_kernel.kprobes.profile import Profile, TrampolineForm
from emulated_kernel.kprobes.return_hook.footprint import memory_table
from emulated_kernel.kprobes.return_hook.hooks import SHADOW_STACKS
from kprobefs.bench import FUNCTION, caller

MODES = {
    "original": Profile("original", ftrace=False, optimizer=False, trampoline=TrampolineForm.BREAKPOINT),
    "booster": Profile("booster", preemption=False, ftrace=False, optimizer=False),
    "optimized": Profile("optimized", ftrace=False),
    "ftrace": Profile("ftrace"),
}
"""How the entry is reached; the first one's trampoline is a breakpoint, the others' code."""
FIRST_PID = 10_000
COLUMNS = ("1 probe, N=cpu", "100 probes, N=cpu", "1 probe, N=task", "100 probes, N=task")


@dataclass(frozen=True)
class Figure:
    """One row: a distribution of ns a call, and what it was measured for."""

    backend: str
    mode: str
    tasks: int
    cpus: int
    distribution: Distribution

    def as_dict(self) -> dict[str, object]:
        own = {"backend": self.backend, "mode": self.mode, "tasks": self.tasks, "cpus": self.cpus}
        return {**own, "ns": self.distribution.median, **self.distribution.as_dict()}


@contextmanager
def sleepers(kernel: Kernel, rp: Kretprobe, number: int) -> Iterator[None]:
    """Other tasks, each with one call of the hooked function pending."""
    stack = kernel.kretprobes.hooks.stack
    assert rp.hook is not None
    tasks = [kernel.guest.mirror.task_of(FIRST_PID + n, 0, 0).addr for n in range(number)]
    for task in tasks:
        node = stack.try_get(rp.hook.address, task)
        stack.push(rp.hook.address, task, node, rp.address, rp.address)
    yield
    for task in tasks:
        stack.pop(task, 1)


def measure(backend: str, mode: str, tasks: int, cpus: int, calls: int, rounds: int) -> Figure:
    """Rounds without the probe and with it, in turns."""
    config = MachineConfig(run_budget=60, cpus=cpus, return_hook=backend)
    with Kernel(config, profile=MODES[mode]) as kernel:
        run = caller(kernel, calls)
        rp = Kretprobe(symbol_name=FUNCTION, handler=lambda *_: None, maxactive=tasks + 1)
        net = []
        for _ in range(rounds + 1):
            unprobed = run()
            kernel.register_kretprobe(rp)
            if kernel.kprobes.optimizer is not None:
                kernel.kprobes.optimizer.flush()
            with sleepers(kernel, rp, tasks - 1):
                net.append(run() - unprobed)
            assert (rp.returns, rp.nmissed) == (calls, 0), "a return was lost"
            kernel.unregister_kretprobe(rp)
    name = f"{backend}, {mode}, {tasks} tasks"
    return Figure(backend, mode, tasks, cpus, Distribution(name, "ns", tuple(net[1:])))


def print_memory(cpus: int, tasks: int) -> None:
    """The slides' table, from what is really allocated."""
    print(f"\nbytes, {cpus} CPUs, {tasks} tasks\n{'':10}" + "".join(f"{column:>20}" for column in COLUMNS))
    for row in memory_table(SHADOW_STACKS.values(), cpus=cpus, tasks=tasks):
        print(f"{row[0].stack:10}" + "".join(f"{cell.memory:20,}" for cell in row))


def main() -> None:
    """Run, report."""
    parser = arguments(__doc__)
    parser.add_argument("--calls", type=int, default=5000, help="calls a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", type=int, nargs="+", default=[1, 100, 500])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--cpus", type=int, default=1)
    options = parser.parse_args()
    figures = [
        measure(backend, mode, tasks, options.cpus, options.calls, options.rounds)
        for mode in options.modes
        for backend in SHADOW_STACKS
        # int_sqrt is hooked by a breakpoint where there are no fentry sites.
        if mode == "ftrace" or backend != "unified"
        for tasks in (options.tasks if mode == options.modes[-1] else options.tasks[:1])
    ]
    if options.json:
        print(json.dumps([figure.as_dict() for figure in figures], indent=2))
        return
    report([figure.distribution for figure in figures], False)
    print_memory(10, 500)


if __name__ == "__main__":
    main()
