"""Quiescence: whether any task of the guest stands, or will come back, in text that is to be patched."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from struct import unpack_from
from typing import Protocol

from emulated_kernel.host.task_list import TaskMemory, TaskSymbols, read_tasks


class StackPointer(Protocol):
    @property
    def sp(self) -> int: ...


class Current(Protocol):
    def current_task(self) -> int: ...


class TaskStacks:
    """Looks for addresses on the live stacks of all tasks: an interrupted task's pt_regs holds its ip.

    Linux waits until each task has switched by its own will, since it can't look. The guest must be stopped
    at a hypercall, so that the CPU itself is nowhere else. Mirrors: synchronize_rcu_tasks (v6.1).
    """

    def __init__(
        self,
        memory: TaskMemory,
        symbols: TaskSymbols,
        abi: Mapping[str, int],
        current: Current,
        regs: StackPointer,
    ) -> None:
        self._memory = memory
        self._symbols = symbols
        self._abi = abi
        self._current = current
        self._regs = regs

    def are_clear_of(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Whether no stack holds an address in the ranges [start, end)."""
        if not spans:
            return True
        ordered = sorted(spans)
        starts = [start for start, _ in ordered]
        first, last = starts[0], max(end for _, end in ordered)
        for words in self._stacks():
            for word in words:
                if first <= word < last:
                    start, end = ordered[bisect_right(starts, word) - 1]
                    if start <= word < end:
                        return False
        return True

    def _stacks(self) -> Iterator[tuple[int, ...]]:
        read_word, abi = self._memory.read_word, self._abi
        word, code = self._memory.word_size, "Q" if self._memory.word_size == 8 else "I"
        running = self._current.current_task()
        for task in read_tasks(self._memory, self._symbols, abi):
            base = read_word(task.addr + abi["task_struct.stack"])
            saved = read_word(task.addr + abi["task_struct.sp"])
            sp = self._regs.sp if task.addr == running else saved
            size = base + abi["thread.size"] - sp
            if 0 < size <= abi["thread.size"]:
                yield unpack_from(f"<{size // word}{code}", self._memory.read(sp, size))
