"""HitRing: the latest hits of probes, with some of their registers, written by guest code without a trap."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from emulated_kernel.arch.base import Arch
from emulated_kernel.arch.program import (
    Arithmetic,
    ComputeImmediate,
    GetRegister,
    LoadCell,
    Move,
    Store,
    StoreCell,
    StoreImmediate,
)
from emulated_kernel.arch.program_builder import ProgramBuilder
from emulated_kernel.kprobes.kprobe import Kprobe

_COUNT, _AT, _VALUE = 0, 1, 2
_FIXED = 2
"""Words of an entry before the registers: the hit's number and the probe's address."""


class Cells(Protocol):
    """Memory that guest code reaches by a displacement; machine.record_memory.RecordMemory."""

    def alloc_cells(self, size: int, /) -> int: ...

    def free_cells(self, va: int, /) -> None: ...

    def view(self, va: int, size: int, /) -> memoryview: ...


@dataclass(frozen=True, slots=True)
class RingEntry:
    """One hit: how many there were before it, the probed address, and the registers asked for."""

    number: int
    address: int
    registers: tuple[int, ...]


class HitRing:
    """The latest `capacity` hits of all its probes, newest last; older ones are overwritten.

    `registers` are names as in pt_regs, two for an entry of four words. What its probes do at a hit is a
    handful of loads and stores, so that it is the cheapest handler there is.
    """

    def __init__(self, cells: Cells, arch: Arch, registers: Sequence[str], capacity: int = 128) -> None:
        """Raises: ValueError (capacity is no power of 2, a register's name), HardwareError (no memory)."""
        if capacity < 1 or capacity & (capacity - 1):
            raise ValueError(f"{capacity} entries: take a power of 2")
        for name in registers:
            if name not in arch.pt_regs:
                raise ValueError(f"no register {name}")
        self._cells = cells
        self._word = word = arch.word_size
        self._registers = tuple(registers)
        self._capacity = capacity
        words = 1 << (_FIXED + len(registers) - 1).bit_length()
        self._shift = (words * word).bit_length() - 1
        self._address = cells.alloc_cells(word + (capacity << self._shift))
        self._start = self._address + word
        code = "Q" if word == 8 else "I"
        self._entry = struct.Struct(f"<{_FIXED + len(registers)}{code}")
        self._view = cells.view(self._address, word + (capacity << self._shift))

    def probe(self, **place: Any) -> Kprobe:
        """A probe that records its hits here, to be registered; `place` as for Kprobe."""
        kprobe = Kprobe(pre_handler=self._note, **place)
        kprobe.program = lambda builder, _way: self._emit(builder, kprobe.address)
        return kprobe

    @property
    def hits(self) -> int:
        """Hits recorded so far, those too that were overwritten."""
        return int.from_bytes(self._view[: self._word], "little")

    def entries(self) -> list[RingEntry]:
        """The hits that are still there, oldest first."""
        found = []
        hits = self.hits
        for number in range(max(0, hits - self._capacity), hits):
            at = self._word + (number % self._capacity << self._shift)
            count, address, *registers = self._entry.unpack_from(self._view, at)
            found.append(RingEntry(count, address, tuple(registers)))
        return found

    def close(self) -> None:
        """Give the memory back, when none of its probes is registered any more."""
        self._view.release()
        self._cells.free_cells(self._address)

    def _note(self, kprobe: Kprobe, regs: Any) -> None:
        """The pre_handler, where the hit has trapped anyway."""
        hits = self.hits
        at = self._word + (hits % self._capacity << self._shift)
        values = [getattr(regs, name) for name in self._registers]
        self._entry.pack_into(self._view, at, hits, kprobe.address, *values)
        self._view[: self._word] = (hits + 1 & (1 << 8 * self._word) - 1).to_bytes(self._word, "little")

    def _emit(self, builder: ProgramBuilder, address: int) -> bool:
        """The same as guest code."""
        word = self._word
        builder.emit(
            LoadCell(_COUNT, self._address, word),
            Move(_AT, _COUNT),
            ComputeImmediate(Arithmetic.AND, _AT, self._capacity - 1),
            ComputeImmediate(Arithmetic.SHL, _AT, self._shift),
            ComputeImmediate(Arithmetic.ADD, _AT, _signed(self._start)),
            Store(_AT, 0, _COUNT, word),
            StoreImmediate(_AT, word, address, word),
        )
        for number, name in enumerate(self._registers, _FIXED):
            builder.emit(GetRegister(_VALUE, name), Store(_AT, number * word, _VALUE, word))
        builder.emit(ComputeImmediate(Arithmetic.ADD, _COUNT, 1), StoreCell(self._address, _COUNT, word))
        return True


def _signed(address: int) -> int:
    """An address of the cells as 32 bits that are extended by their sign."""
    return (address & 0xFFFFFFFF ^ 1 << 31) - (1 << 31)
