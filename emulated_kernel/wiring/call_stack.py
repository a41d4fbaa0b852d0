"""Call chains of the guest: return addresses found on the current task's stack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from struct import unpack_from
from typing import Any, Protocol

from emulated_kernel.abi import PAGE_SIZE
from emulated_kernel.arch.base import Arch
from emulated_kernel.machine.traps import MemoryFault
from emulated_kernel.trace.ports import TraceSymbols

MAX_CALLERS = 32


class StackMemory(Protocol):
    def read(self, va: int, size: int, /) -> bytes: ...


class CallStack:
    """Finds callers without frame pointers or unwind tables.

    A word counts as a return address if a call stands before the place that it names: an indirect one, or
    one of the function that the inner frame is in, or of one that jumps there as its last act.
    Deviates: Linux follows ORC tables; a stale word can pass for a caller here if it names such a call.
    """

    def __init__(self, memory: StackMemory, symbols: TraceSymbols, arch: Arch, thread_size: int) -> None:
        self._memory = memory
        self._symbols = symbols
        self._arch = arch
        self._thread_size = thread_size

    def caller(self, regs: Any) -> int:
        """Where the function that stands at its entry returns to."""
        link = self._arch.registers.link
        if link is not None:
            return int(getattr(regs, link))
        size = self._arch.word_size
        return int.from_bytes(self._memory.read(getattr(regs, self._arch.registers.sp), size), "little")

    def callers(self, regs: Any) -> list[int]:
        """The place of `regs`, then return addresses, innermost first."""
        registers = self._arch.registers
        place, sp = getattr(regs, registers.ip), getattr(regs, registers.sp)
        link = None if registers.link is None else getattr(regs, registers.link)
        found = islice(self.returns(place, sp, link), MAX_CALLERS - 1)
        return [place, *(address for address, _ in found)]

    def returns(self, place: int, sp: int, link: int | None = None) -> Iterator[tuple[int, int]]:
        """Where the calls that led to `place` return to, innermost first, each with its stack slot.

        `link`: what the link register holds, which may be the first of them.
        """
        function = self._function(place)
        slots = ((word, sp + number * self._arch.word_size) for number, word in enumerate(self._words(sp)))
        for word, slot in slots if link is None else chain([(link, sp)], slots):
            if not function:
                return
            if self._returns_from(word, function):
                yield word, slot
                function = self._function(word)

    def _words(self, sp: int) -> Sequence[int]:
        """Up to where a task's stack ends; the CPU's own ones are smaller, with nothing behind them."""
        data, end = b"", (sp | self._thread_size - 1) + 1
        with suppress(MemoryFault):
            while (at := sp + len(data)) < end:
                data += self._memory.read(at, PAGE_SIZE - at % PAGE_SIZE)
        count = len(data) // self._arch.word_size
        return unpack_from(f"<{count}{'Q' if self._arch.word_size == 8 else 'I'}", data)

    def _function(self, address: int) -> int:
        found = self._symbols.lookup(address)
        return found.start if found else 0

    def _returns_from(self, word: int, function: int) -> bool:
        """Whether `word` is where a call that led to `function` returns to."""
        found = self._symbols.lookup(word)
        if found is None or not found.offset:
            return False
        size = min(self._arch.max_call_size, found.offset)
        call = self._arch.call_before(self._memory.read(word - size, size), word)
        if call is None or call.target is None:
            return call is not None
        return call.target == function or function in self._jumps(call.target)

    def _jumps(self, address: int) -> frozenset[int]:
        """Where the function at `address` jumps to."""
        found = self._symbols.lookup(address)
        if found is None or found.offset:
            return frozenset()
        return frozenset(self._arch.jump_targets(self._memory.read(found.start, found.size), found.start))
