"""KernelStacks: finds code that tasks of a distribution's kernel use, by its task list and their stacks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from struct import unpack_from

from emulated_kernel.guests.common.address_ranges import AddressRanges
from emulated_kernel.guests.common.guest_data import readable
from emulated_kernel.guests.linux.guest.linux_task import THREAD_SIZE
from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.machine.memory.guest_memory import GuestMemory
from emulated_kernel.machine.task_stacks import TaskStacks

_MEMBERS = (
    "task_struct.tasks", "task_struct.stack", "task_struct.thread.sp", "task_struct.signal",
    "task_struct.thread_node", "signal_struct.thread_head",
)  # fmt: skip
_LIMIT = 1 << 22
"""Limit of tasks; a longer list is circular."""


class KernelStacks(TaskStacks):
    """Looks for addresses in the CPU's registers and on the live stacks of all tasks.

    A word that only looks like an address counts too. The guest must be stopped.
    Mirrors: synchronize_rcu_tasks (v6.1).
    Raises: KernelError ENOEXEC, ENOENT, ENODATA (the kernel's structures are unknown).
    """

    def __init__(
        self, kernel: LinuxKernel, machine: LinuxMachine, memory: GuestMemory, per_cpu: int, current: int
    ) -> None:
        """Find the lists. `current`: address of the variable with the running task's address."""
        self._machine = machine
        self._memory = memory
        self._current = current
        self._offsets = {path: kernel.btf.offset(path) for path in _MEMBERS}
        first = kernel.kallsyms.lookup_name("init_task")
        irq_stack = kernel.per_cpu("hardirq_stack_ptr")
        if first is None or irq_stack is None:
            raise unusable("its symbols lack init_task or hardirq_stack_ptr")
        self._first = first
        self._irq_stack = per_cpu + irq_stack

    def task_structs(self) -> Iterator[int]:
        """Iterate over all task_structs: those of each process and its threads, then the idle task's."""
        offset = self._offsets
        word = self._memory.read_word
        for leader in self._list(self._first + offset["task_struct.tasks"], "task_struct.tasks"):
            head = word(leader + offset["task_struct.signal"]) + offset["signal_struct.thread_head"]
            yield from self._list(head, "task_struct.thread_node")
        yield self._first

    def _list(self, head: int, member: str) -> Iterator[int]:
        """Iterate over a list's structures, which are linked through `member`. Raises: MemoryFault."""
        node = self._memory.read_word(head)
        for _ in range(_LIMIT):
            if node == head:
                return
            yield node - self._offsets[member]
            node = self._memory.read_word(node)

    def in_use_ranges(self, spans: Sequence[tuple[int, int]]) -> Collection[tuple[int, int]]:
        """Return the ranges to which a task may return; all of them if the CPU uses an unknown stack."""
        if not spans:
            return ()
        wanted = AddressRanges(spans)
        with readable("task list"):
            stacks = [*self._stacks()]
            if self._machine.cpu.privilege == 0 and not any(is_used for _, _, is_used in stacks):
                return spans
            parts = [self._registers(), *(self._part(start, end) for start, end, _ in stacks)]
        return {span for words in parts for word in words if (span := wanted.around(word))}

    def _registers(self) -> tuple[int, ...]:
        return tuple(self._machine.regs.snapshot())

    def _stacks(self) -> Iterator[tuple[int, int, bool]]:
        """Iterate over the live parts of stacks: start, end, and whether the CPU uses the stack."""
        word = self._memory.read_word
        offset = self._offsets
        sp = self._machine.regs.sp
        current = word(self._current)
        in_kernel = self._machine.cpu.privilege == 0
        top = word(self._irq_stack) + 8
        if in_kernel and top - THREAD_SIZE < sp <= top:
            yield sp, top, True
        for task in self.task_structs():
            base = word(task + offset["task_struct.stack"])
            end = base + THREAD_SIZE
            if not base:
                # The task has ended, and its stack is freed.
                continue
            if task != current:
                yield max(base, word(task + offset["task_struct.thread.sp"])), end, False
            elif in_kernel:
                # If the CPU uses another stack, the position where it left the task's stack is unknown.
                is_used = base < sp <= end
                yield sp if is_used else base, end, is_used

    def _part(self, start: int, end: int) -> tuple[int, ...]:
        words = (end - start) // 8
        return unpack_from(f"<{words}Q", self._memory.read(start, words * 8)) if words > 0 else ()
