"""KernelStacks: finds out from registers and stacks which code the tasks of a distribution's kernel use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from struct import unpack_from

from emulated_kernel.guests.common.address_ranges import AddressRanges
from emulated_kernel.guests.linux.guest.linux_task import THREAD_SIZE
from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.machine.memory.guest_memory import GuestMemory
from emulated_kernel.machine.memory.guest_reader import GuestReader
from emulated_kernel.machine.task_stacks import TaskStacks
from emulated_kernel.machine.traps.trap import MemoryFault

_MEMBERS = (
    "task_struct.tasks", "task_struct.stack", "task_struct.signal",
    "task_struct.thread_node", "signal_struct.thread_head",
)  # fmt: skip


class KernelStacks(TaskStacks):
    """Searches the CPU's registers and the live stacks of all tasks for addresses in given ranges.

    A word that only looks like an address counts too. The guest must be stopped.
    Mirrors: kernel/rcu/tasks.h:synchronize_rcu_tasks (v6.1).
    Raises: KernelError ENOEXEC, ENOENT, ENODATA (the kernel's structures are unknown).
    """

    def __init__(
        self,
        kernel: LinuxKernel,
        machine: LinuxMachine,
        memory: GuestMemory,
        per_cpu: int,
        running: Callable[[], int],
    ) -> None:
        """Look up the task list and the stacks of the kernel.

        `per_cpu`: address of the CPU's per-CPU area. `running`: see RunningLinux.
        """
        self._machine = machine
        self._memory = memory
        self._running = running
        abi = machine.abi
        self._offsets = {path: kernel.btf.offset(path) for path in _MEMBERS}
        self._saved_sp = kernel.btf.offset(abi.saved_sp)
        self._first = kernel.required("init_task")
        self._irq_stack = per_cpu + kernel.required_per_cpu(abi.irq_stack)
        self._irq_stack_size = abi.irq_stack_size

    def task_structs(self) -> Iterator[int]:
        """Yield the addresses of all task_structs: of each process and its threads, then of the idle task.

        If the guest's task list is damaged, log the damage, and leave out the tasks after the damaged entry.
        """
        with self._machine.damage.left_out("task list"):
            yield from self._tasks(self._reader())
        yield self._first

    def _reader(self) -> GuestReader:
        return GuestReader(self._memory, "task list", self._machine.damage)

    def _tasks(self, reader: GuestReader) -> Iterator[int]:
        """Yield the addresses of the task_structs of all processes and threads.

        Raises: MemoryFault (the guest has damaged the task list).
        """
        offset = self._offsets
        for node in reader.nodes(self._first + offset["task_struct.tasks"]):
            leader = node - offset["task_struct.tasks"]
            head = reader.word(leader + offset["task_struct.signal"]) + offset["signal_struct.thread_head"]
            for thread in reader.nodes(head):
                yield thread - offset["task_struct.thread_node"]

    def in_use_ranges(self, spans: Sequence[tuple[int, int]]) -> Collection[tuple[int, int]]:
        """Return the ranges of `spans` that the CPU executes or to which a task may return.

        `spans`: pairs (start, end).

        Return all of `spans` if the CPU uses an unknown stack, or if the guest's data about its tasks are
        damaged.
        """
        if not spans:
            return ()
        wanted = AddressRanges(spans)
        reader = self._reader()
        try:
            stacks = [*self._stacks(reader)]
            if self._machine.cpu.privilege == 0 and not any(is_used for _, _, is_used in stacks):
                return spans
            parts = [self._registers(), *(self._part(reader, start, end) for start, end, _ in stacks)]
        except MemoryFault as fault:
            self._machine.damage.report("task list", fault)
            return spans
        return {span for words in parts for word in words if (span := wanted.around(word))}

    def _registers(self) -> tuple[int, ...]:
        return tuple(self._machine.regs.snapshot())

    def _stacks(self, reader: GuestReader) -> Iterator[tuple[int, int, bool]]:
        """Yield (start, end, is_used) for the live part of each stack; is_used: the CPU uses the stack."""
        word = reader.word
        offset = self._offsets
        sp = self._machine.regs.sp
        current = self._running()
        in_kernel = self._machine.cpu.privilege == 0
        top = word(self._irq_stack) + self._irq_stack_size
        if in_kernel and top - THREAD_SIZE < sp <= top:
            yield sp, top, True
        for task in chain(self._tasks(reader), (self._first,)):
            base = word(task + offset["task_struct.stack"])
            end = base + THREAD_SIZE
            if not base:
                # The task has ended, and its stack is freed.
                continue
            if task != current:
                yield max(base, word(task + self._saved_sp)), end, False
            elif in_kernel:
                # If the CPU uses another stack, the position where it left the task's stack is unknown.
                is_used = base < sp <= end
                yield sp if is_used else base, end, is_used

    def _part(self, reader: GuestReader, start: int, end: int) -> tuple[int, ...]:
        words = (end - start) // 8
        return unpack_from(f"<{words}Q", reader.read(start, words * 8)) if words > 0 else ()
