"""A hit as an event's handler sees it, and the task that made it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from emulated_kernel.machine.memory.guest_memory import GuestMemory
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.util.fast_dataclass import dataclass


@dataclass(frozen=True)
class TaskContext:
    """Who does something, for records made on a task's behalf."""

    pid: int = 0
    comm: str = "swapper/0"
    cpu: int = 0


class Tasks:
    """Reads the current task of the guest: pid and name, for records and $comm."""

    def __init__(self, machine: ProbedMachine, abi: Mapping[str, int]) -> None:
        memory = machine.memory
        self._machine = machine
        self._memory = memory
        word = memory.word_size
        views = (memory.view(area + abi["percpu.current_task"], word) for area in machine.per_cpu_bases)
        self._currents = [view.cast("Q" if word == 8 else "I") for view in views]
        self._pid = abi["task_struct.pid"]
        self._comm = abi["task_struct.comm"]

    def cpu(self) -> int:
        """The number of the CPU that runs."""
        return self._machine.cpu

    def current(self) -> int:
        """The address of the task_struct that runs on it."""
        return int(self._currents[self._machine.cpu][0])

    def pid(self) -> int:
        """Of the current task."""
        return int.from_bytes(self._memory.read(self.current() + self._pid, 4), "little", signed=True)

    def comm(self) -> bytes:
        """The name without its padding, 15 bytes at most."""
        return self._memory.read(self.current() + self._comm, 16).split(b"\0", 1)[0]

    def context(self) -> TaskContext:
        """For records that no probe makes."""
        return TaskContext(self.pid(), self.comm().decode("utf-8", "surrogateescape"), self.cpu())


class ProbeHit:
    """The hit being handled; one object, valid during the call."""

    def __init__(
        self,
        memory: GuestMemory,
        tasks: Tasks,
        context: Callable[[Any], tuple[int, int]],
        regs: Any = None,
    ) -> None:
        """`context` gives common_flags and common_preempt_count of a hit with these registers.

        `regs`: of what no hit makes; whoever takes hits puts each one's there.
        """
        self.return_address = 0
        """Of a return probe: where the function returns to."""
        self._memory = memory
        self._tasks = tasks
        self._context = context
        self.regs = regs
        """The registers at the hit, attributes as in Arch.registers."""
        self.chain: Sequence[int] | None = None
        """Its call chain, where several ask for it and one has."""
        self.has_several = False
        """Whether more than one may handle it."""
        self.handler_preempt_count = 0
        """What Linux's own handler adds to the count, and leaves in the entry."""
        self.entry_waits = False
        """An entry that may yet be rejected waits outside of the buffer, in the one page for such."""

    @property
    def context(self) -> tuple[int, int]:
        """common_flags and common_preempt_count of its entry."""
        flags, count = self._context(self.regs)
        return flags, count + self.handler_preempt_count

    @property
    def comm(self) -> bytes:
        """The current task's name, without padding."""
        return self._tasks.comm()

    def read(self, address: int, size: int) -> bytes | None:
        """Guest memory; None where a byte of it faults."""
        try:
            return self._memory.read(address, size)
        except MemoryFault:
            return None


@contextmanager
def within_another(hit: ProbeHit, *, preempt_count: int) -> Iterator[None]:
    """Entries made meanwhile have so much more of the count: another one is being written."""
    hit.handler_preempt_count += preempt_count
    try:
        yield
    finally:
        hit.handler_preempt_count -= preempt_count
