"""StackScanner: finds text that must not be patched yet.

A CPU executes this text, or a task will return to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from struct import unpack_from

from emulated_kernel.guests.builtin.readers.task_list import task_structs
from emulated_kernel.guests.common.address_ranges import AddressRanges
from emulated_kernel.image.kallsyms import Kallsyms
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.memory.guest_reader import GuestReader
from emulated_kernel.machine.traps.trap import MemoryFault


class StackScanner:
    """Searches the CPUs' registers and the live stacks of all tasks for addresses in given ranges.

    The search also finds the ip of an interrupted task, in pt_regs on the task's stack. A word that only
    looks like an address counts too. The guest must be stopped. Linux cannot scan stacks; it waits until each
    task has switched voluntarily. Mirrors: kernel/rcu/tasks.h:synchronize_rcu_tasks (v6.1).
    """

    def __init__(
        self, reader: Callable[[], GuestReader], symbols: Kallsyms, abi: Mapping[str, int], cpus: Machine
    ) -> None:
        """Create a scanner for the tasks and CPUs of a guest. `reader` returns a new reader of its memory."""
        self._reader = reader
        self._symbols = symbols
        self._abi = abi
        self._cpus = cpus
        self._size = abi["thread.size"]

    def in_use_ranges(self, spans: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
        """Return the ranges of `spans` to which a CPU register or a word on a task's stack points.

        `spans`: disjoint ranges [start, end). If the guest has corrupted its task list or stacks, return all
        of `spans`.
        """
        try:
            return set(self._met(spans))
        except MemoryFault:
            return set(spans)

    def _met(self, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Yield, for each register value and stack word that points into a range of `spans`, this range."""
        if not spans:
            return
        wanted = AddressRanges(spans)
        first = wanted.first
        last = wanted.last
        around = wanted.around
        for words in chain(
            [self._cpus.register_values()], self._stacks(self._reader(), self._cpus.positions())
        ):
            for word in words:
                if first <= word < last:
                    span = around(word)
                    if span is not None:
                        yield span

    def _stacks(self, reader: GuestReader, positions: Sequence[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
        """Yield the live words of each stack; `positions` has (ip, sp) of each CPU."""
        read_word = reader.word
        abi = self._abi
        running = {}
        tasks = dict.fromkeys(task_structs(reader, self._symbols, abi))
        for area, (_, sp) in zip(self._cpus.per_cpu_bases, positions, strict=True):
            running[read_word(area + abi["percpu.current_task"])] = sp
            tasks[read_word(area + abi["percpu.idle_task"])] = None
            top = read_word(area + abi["percpu.hardirq_stack_ptr"])
            yield from self._part(reader, top - self._size, sp)
        for task in tasks:
            base = read_word(task + abi["task_struct.stack"])
            sp = running.get(task, read_word(task + abi["task_struct.sp"]))
            # If the CPU is on its interrupt stack, sp on the task's stack is unknown: scan all of that stack.
            yield from self._part(reader, base, sp if base <= sp <= base + self._size else base)

    def _part(self, reader: GuestReader, base: int, sp: int) -> Iterator[tuple[int, ...]]:
        """Yield the words from `sp` to the top of the stack at `base`, if `sp` is on this stack."""
        size = base + self._size - sp
        if base and 0 < size <= self._size:
            word = reader.word_size
            code = "Q" if word == 8 else "I"
            yield unpack_from(f"<{size // word}{code}", reader.read(sp, size))
