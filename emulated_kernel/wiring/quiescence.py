"""Quiescence: whether any CPU or task stands, or will come back, in text that is to be patched."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from struct import unpack_from
from typing import Protocol

from emulated_kernel.host.task_list import TaskMemory, TaskSymbols, read_tasks


class Cpus(Protocol):
    """What it needs of the machine."""

    @property
    def per_cpu_bases(self) -> list[int]: ...

    def stands(self) -> list[tuple[int, int]]:
        """Instruction and stack pointer of each CPU."""

    def held(self) -> list[int]:
        """What is in the registers of all CPUs, the instruction pointers included."""


class Spans:
    """Ranges [start, end) of addresses."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self._ordered = sorted(spans)
        self._starts = [start for start, _ in self._ordered]
        self.first, self.last = self._starts[0], max(end for _, end in self._ordered)

    def around(self, address: int) -> tuple[int, int] | None:
        """The range that holds an address."""
        if not self.first <= address < self.last:
            return None
        start, end = self._ordered[bisect_right(self._starts, address) - 1]
        return (start, end) if start <= address < end else None


class TaskStacks:
    """Looks for addresses in the CPUs' registers and on the live stacks of all tasks.

    An interrupted task's pt_regs holds its ip. A word that only looks like an address counts too. Linux waits
    until each task has switched by its own will, since it can't look. The guest must be stopped.
    Mirrors: synchronize_rcu_tasks (v6.1).
    """

    def __init__(self, memory: TaskMemory, symbols: TaskSymbols, abi: Mapping[str, int], cpus: Cpus) -> None:
        self._memory = memory
        self._symbols = symbols
        self._abi = abi
        self._cpus = cpus
        self._size = abi["thread.size"]

    def are_clear_of(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Whether no register and no stack holds an address in the ranges [start, end)."""
        return next(self._met(spans), None) is None

    def occupied(self, spans: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
        """Those of the ranges, none over another, in which a register or a stack holds an address."""
        return set(self._met(spans))

    def _met(self, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        if not spans:
            return
        wanted = Spans(spans)
        first, last, around = wanted.first, wanted.last, wanted.around
        for words in chain([self._cpus.held()], self._stacks(self._cpus.stands())):
            for word in words:
                if first <= word < last:
                    span = around(word)
                    if span is not None:
                        yield span

    def _stacks(self, stands: Sequence[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
        read_word, abi = self._memory.read_word, self._abi
        running = {}
        tasks = [task.addr for task in read_tasks(self._memory, self._symbols, abi)]
        for area, (_, sp) in zip(self._cpus.per_cpu_bases, stands, strict=True):
            running[read_word(area + abi["percpu.current_task"])] = sp
            idle = read_word(area + abi["percpu.idle_task"])
            if idle not in tasks:
                tasks.append(idle)
            yield from self._part(read_word(area + abi["percpu.hardirq_stack_ptr"]) - self._size, sp)
        for task in tasks:
            base = read_word(task + abi["task_struct.stack"])
            sp = running.get(task, read_word(task + abi["task_struct.sp"]))
            # Of a CPU that stands on its interrupt stack it is not known where it left the task's.
            yield from self._part(base, sp if base <= sp <= base + self._size else base)

    def _part(self, base: int, sp: int) -> Iterator[tuple[int, ...]]:
        """The words from `sp` to the top of a stack; none if it points elsewhere."""
        size = base + self._size - sp
        if 0 < size <= self._size:
            word = self._memory.word_size
            code = "Q" if word == 8 else "I"
            yield unpack_from(f"<{size // word}{code}", self._memory.read(sp, size))
