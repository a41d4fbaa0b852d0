"""Counts the guest instructions of a function that several CPUs call at the same time.

The CPUs take turns of one instruction, in a random order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.machine.cpu.registers import RegisterSet
from emulated_kernel.util.fast_dataclass import dataclass

_FIRST_PID = 20_000
_SEED = 2023
_CALLS = 6
_STACK = 1 << 10
_TRAP_FLAG = 1 << 8
_INTERRUPT_FLAG = 1 << 9


@dataclass(frozen=True)
class InstructionCounts:
    """Guest instructions per call, including instructions that are repeated because of other CPUs."""

    all: float
    locked: float
    """Number of instructions per call that were executed while any CPU held a lock of the shadow stack."""


def instructions_a_call(kernel: Kernel, function: str, cpus: int, calls: int = _CALLS) -> InstructionCounts:
    """Count the guest instructions per call of `function`, with a task for each of the first `cpus` CPUs.

    Each CPU makes `calls` calls. The random order of turns is the same in each run.
    """
    address = kernel.image.kallsyms.lookup_name(function)
    assert address is not None
    taken = 0
    locked = 0
    rng = Random(_SEED)
    read = kernel.machine.memory.read_word
    locks = kernel.kretprobes.hooks.stack.lock_words()
    with kernel.lock, _contexts(kernel, address, cpus) as contexts:
        left = [context for context in contexts for _ in range(calls)]
        while left:
            context = rng.choice(left)
            context.step()
            taken += 1
            locked += any(map(read, locks))
            if context.has_returned:
                left.remove(context)
                context.restart()
    return InstructionCounts(taken / (cpus * calls), locked / (cpus * calls))


@contextmanager
def _contexts(kernel: Kernel, address: int, cpus: int) -> Iterator[list[_CpuContext]]:
    """Yield a list with the context of each of the first `cpus` CPUs.

    Each of these CPUs is about to call the function at `address`.

    At the end of the `with` block, restore the guest's state.
    """
    machine = kernel.machine
    abi = kernel.image.abi
    word = kernel.arch.word_size
    tasks = [kernel.guest.processes.task_of(_FIRST_PID + cpu, 0, 0).addr for cpu in range(cpus)]
    area = machine.per_cpu_bases[machine.cpu]
    view = machine.memory.view(area + abi["percpu.current_task"], word)
    current = view.cast("Q") if word == 8 else view.cast("I")
    number = machine.memory.view(area + abi["percpu.cpu_number"], 4).cast("I")
    before = current[0], number[0]
    try:
        yield [_CpuContext(kernel, address, cpu, tasks[cpu], current, number) for cpu in range(cpus)]
    finally:
        current[0], number[0] = before


class _CpuContext:
    """The registers of one CPU, and the per-CPU variables that identify it to the guest."""

    def __init__(
        self, kernel: Kernel, address: int, cpu: int, task: int, current: memoryview, number: memoryview
    ) -> None:
        machine = kernel.machine
        self._machine = machine
        self._identity = task, cpu
        self._current = current
        self._number = number
        self._pad = machine.model.layout.host_text
        self._start = RegisterSet(
            ip=address, sp=machine.calls.stack_top - (cpu + 1) * _STACK, flags=_INTERRUPT_FLAG
        )
        self.restart()

    def restart(self) -> None:
        self._state = self._start
        self._machine.memory.write_word(self._start.sp, self._pad)

    @property
    def has_returned(self) -> bool:
        return self._state.ip == self._pad

    def step(self) -> None:
        """Run one guest instruction on this CPU; if it is a breakpoint, run its handler instead."""
        self._current[0], self._number[0] = self._identity
        # The other contexts continue later, so the machine must not drop their state.
        start = self._state._replace(flags=self._state.flags | _TRAP_FLAG)
        _, state = self._machine.trap_of(start, goes_on=True)
        self._state = state._replace(flags=state.flags & ~_TRAP_FLAG)
