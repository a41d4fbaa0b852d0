"""ProbeHit, the hit that an event's handler gets, and Tasks, which reads the current task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from emulated_kernel.machine.memory.guest_memory import GuestMemory
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.util.fast_dataclass import dataclass

_COMM_SIZE = 16
"""Size of a task's name in bytes. Mirrors: include/linux/sched.h:TASK_COMM_LEN (v6.1)."""
_NEST_START = 2
"""Amount that ring_buffer_nest_start() and the open entry of the hit add to preempt_count."""


Origin = tuple[int, int, bytes, int, int]
"""Result of ProbeHit.origin(): CPU, the task's pid and name, common_flags and common_preempt_count."""


@dataclass(frozen=True)
class TaskContext:
    """The task for which a record is made, and its CPU; by default the idle task of CPU 0."""

    pid: int = 0
    comm: str = "swapper/0"
    cpu: int = 0


class Tasks:
    """Reads the current CPU and the pid and name of its current task, for records and $comm."""

    def __init__(self, machine: ProbedMachine, abi: Mapping[str, int]) -> None:
        memory = machine.memory
        self._machine = machine
        self._memory = memory
        word = memory.word_size
        self._currents: list[memoryview] = []
        if machine.running_task is not None:
            self.current = machine.running_task  # type: ignore[method-assign]
        else:
            views = (memory.view(area + abi["percpu.current_task"], word) for area in machine.per_cpu_bases)
            self._currents += [view.cast("Q" if word == 8 else "I") for view in views]
        self._pid = abi["task_struct.pid"]
        self._comm = abi["task_struct.comm"]

    def cpu(self) -> int:
        """Return the number of the current CPU."""
        return self._machine.cpu

    def current(self) -> int:
        """Return the address of the current task's task_struct."""
        return int(self._currents[self._machine.cpu][0])

    def per_cpu_base(self) -> int:
        """Return the address of the current CPU's per-CPU area."""
        return self._machine.per_cpu_bases[self._machine.cpu]

    def pid(self) -> int:
        """Return the current task's pid, or 0 if the guest has damaged the address of its current task."""
        return int.from_bytes(self._field(self._pid, 4), "little", signed=True)

    def comm(self) -> bytes:
        """Return the current task's name without padding, 15 bytes at most.

        The name is empty if the guest has damaged the address of its current task.
        """
        return self._field(self._comm, _COMM_SIZE).split(b"\0", 1)[0]

    def comm_view(self) -> memoryview:
        """Return a view of the current task's name in the guest.

        Raises: MemoryFault (the guest has damaged the address of its current task).
        """
        return self._memory.view(self.current() + self._comm, _COMM_SIZE)

    def _field(self, offset: int, size: int) -> bytes:
        try:
            return self._memory.read(self.current() + offset, size)
        except MemoryFault as fault:
            self._machine.damage.report("current task", fault)
            return bytes(size)

    def context(self) -> TaskContext:
        """Return the current task and CPU, for records that no probe makes."""
        return TaskContext(self.pid(), self.comm().decode("utf-8", "surrogateescape"), self.cpu())


class ProbeHit:
    """The hit that is being handled. One object serves many hits; its data is valid while a handler runs."""

    def __init__(
        self,
        memory: GuestMemory,
        tasks: Tasks,
        context: Callable[[Any, int], tuple[int, int]],
        regs: Any = None,
    ) -> None:
        """Create an object for hits, which reads their data from `memory` and `tasks`.

        `context` returns common_flags and common_preempt_count. The arguments of `context` are the registers,
        and an amount to add to preempt_count. `regs`: registers for records that are made without a hit; None
        if there are no such records. At each hit, the caller sets the attribute `regs`.
        """
        self.return_address = 0
        """Address that the function returns to, at a hit of a return probe."""
        self.entry_data = b""
        """Data that was stored at the function's entry, at a hit of a return probe."""
        self._memory = memory
        self._tasks = tasks
        self._context = context
        self.regs = regs
        """The registers at the hit; their names are those in Arch.registers."""
        self.chain: Sequence[int] | None = None
        """Cached call chain of the hit; None if it was not computed, or is not cached (see `has_several`)."""
        self.has_several = False
        """Whether several events or trace arrays may handle the hit; only then is its call chain cached."""
        self.handler_preempt_count = 0
        """Amount by which Linux's own handler increases common_preempt_count of the entry."""
        self.nested = 0
        """Nesting depth of entries that are written while the hit's entry is still open."""
        self._origin: tuple[int, Origin] | None = None
        """handler_preempt_count, and the result of origin() with this value; None if no result is kept.

        Results are kept after keep_origin(True).
        """
        self._keeps_origin = False
        self.entry_waits = False
        """Whether an entry of the hit is not written yet, because it may be rejected.

        Linux keeps the entry in trace_buffered_event.
        """

    @property
    def context(self) -> tuple[int, int]:
        """The fields common_flags and common_preempt_count of the hit's entry."""
        return self._context(self.regs, self.handler_preempt_count)

    @property
    def comm(self) -> bytes:
        """The current task's name, without padding."""
        return self._tasks.comm()

    @property
    def current(self) -> int:
        """Address of the current task's task_struct."""
        return self._tasks.current()

    @property
    def per_cpu_base(self) -> int:
        """Address of the current CPU's per-CPU area; add a per-CPU variable's address to it."""
        return self._tasks.per_cpu_base()

    def origin(self) -> Origin:
        """Return the CPU, task and context flags of the hit, which all of its entries have in common.

        After keep_origin(True), these values are read only once for each hit.
        """
        kept = self._origin
        if kept is not None and kept[0] == self.handler_preempt_count:
            return kept[1]
        tasks = self._tasks
        origin = (tasks.cpu(), tasks.pid(), self.comm, *self.context)
        if self._keeps_origin:
            self._origin = self.handler_preempt_count, origin
        return origin

    def keep_origin(self, keep: bool) -> bool:
        """Set whether origin() keeps its result for further entries of the hit; return the former setting.

        If `keep` is False, also drop the kept result.
        """
        before = self._keeps_origin
        self._keeps_origin = keep
        if not keep:
            self._origin = None
        return before

    def read(self, address: int, size: int) -> bytes | None:
        """Return `size` bytes of guest memory, or None if a byte cannot be read."""
        try:
            return self._memory.read(address, size)
        except MemoryFault:
            return None


MAX_NESTING = 32
"""Maximum number of open entries of a ring buffer: each is written while the one before it is open.

Linux: an open entry sets one of the 32 bits in the buffer's current_context. The bit's position is five
higher than that of the entry before it, modulo 32.
Mirrors: kernel/trace/ring_buffer.c:trace_recursive_lock, ring_buffer_nest_start (v6.1).
"""


@contextmanager
def nested_in(hit: ProbeHit) -> Iterator[bool]:
    """Return a context manager in which a further entry is written while the hit's entry is still open.

    The context manager yields True if the entry may be written, and False if the nesting is too deep.

    Mirrors: kernel/trace/ring_buffer.c:ring_buffer_nest_start, ring_buffer_nest_end (v6.1).
    """
    hit.nested += 1
    try:
        with within_another(hit, preempt_count=_NEST_START):
            yield hit.nested < MAX_NESTING
    finally:
        hit.nested -= 1


@contextmanager
def within_another(hit: ProbeHit, *, preempt_count: int) -> Iterator[None]:
    """Add `preempt_count` to common_preempt_count of the hit's entries inside the `with` block.

    Linux writes the entries while another entry is still open, with preemption disabled.
    """
    hit.handler_preempt_count += preempt_count
    try:
        yield
    finally:
        hit.handler_preempt_count -= preempt_count
