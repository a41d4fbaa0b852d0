"""HitRing: the latest hits of probes, with some of their registers.

Guest code records the hits without a trap.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from errno import ENOMEM
from typing import Any

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.program.ir import (
    Arithmetic,
    ComputeImmediate,
    ComputePerCpu,
    GetRegister,
    LoadPerCpu,
    Move,
    Store,
    StoreImmediate,
    StorePerCpu,
)
from emulated_kernel.arch.program.ir_builder import ProgramBuilder
from emulated_kernel.kprobes.kinds.fprobe import CALLED, Fprobe
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import ADDRESS, dataclass, field

_COUNT = 0
_AT = 1
_VALUE = 2
_FIXED = 2
"""Number of words of an entry before the registers: the hit's number and the probe's address."""


@dataclass(frozen=True, slots=True)
class RingEntry:
    """One hit that a HitRing has recorded."""

    number: int
    """Number of earlier hits of the ring's probes on the same CPU."""
    address: int = field(metadata=ADDRESS)
    """The probed address."""
    registers: tuple[int, ...] = field(metadata=ADDRESS)
    """Values of the ring's registers, in their order."""
    cpu: int = 0
    """Number of the CPU on which the hit happened."""


class HitRing:
    """For each CPU, a ring with the latest hits of the ring's probes; Kernel.hit_ring() creates the object.

    `registers` are names as in pt_regs, and `capacity` is the number of entries for each CPU. An entry has a
    word for each register, and two other words. The handlers take less time than any other kind, because they
    are a few loads and stores in guest code.
    """

    def __init__(self, machine: ProbedMachine, arch: Arch, registers: Sequence[str], capacity: int) -> None:
        """Allocate a ring for each CPU.

        The class describes `registers` and `capacity`.

        Raises: ValueError (capacity is not a power of 2, or unknown register), KernelError
        ENOMEM.
        """
        if capacity < 1 or capacity & (capacity - 1):
            raise ValueError(f"capacity: {capacity} is not a power of 2")
        for name in registers:
            if name not in arch.pt_regs:
                raise ValueError(f"registers: no register {name}")
        self._machine = machine
        cells = machine.records
        self._memory = cells
        word = arch.word_size
        self._word = word
        self._registers = tuple(registers)
        self._kept = frozenset() if arch.returns is None else arch.returns.live.registers
        self._capacity = capacity
        words = 1 << (_FIXED + len(registers) - 1).bit_length()
        self._shift = (words * word).bit_length() - 1
        code = "Q" if word == 8 else "I"
        self._entry = struct.Struct(f"<{_FIXED + len(registers)}{code}")
        try:
            self._offset = cells.alloc_percpu(2 * word)
        except HardwareError as error:
            raise KernelError(ENOMEM, f"hit_ring: {error}; close another ring") from error
        self._cells = [cell.cast(code) for cell in cells.cells(self._offset, 2 * word)]  # type: ignore[call-overload]
        """For each CPU, a view of two words: the number of its hits so far, and the address of its ring."""
        self._views: list[memoryview] = []
        try:
            for cell in self._cells:
                self._add_ring(cell)
        except HardwareError as error:
            self.close()
            raise KernelError(ENOMEM, f"hit_ring: {error}; use a smaller capacity") from error

    def _add_ring(self, cell: memoryview) -> None:
        size = self._capacity << self._shift
        start = self._memory.alloc_pages(size)
        cell[1] = start
        self._views.append(self._memory.view(start, size))

    def probe(self, **place: Any) -> Kprobe[Any]:
        """Return a kprobe that records its hits in this ring. The caller registers it.

        `place`: arguments of Kprobe that name the instruction, such as `symbol_name`.
        """
        kprobe: Kprobe[Any] = Kprobe(
            pre_handler=lambda kprobe, regs: self._note(kprobe.address, regs), **place
        )
        kprobe.program = lambda builder, _way: self._emit(builder, kprobe.address)
        return kprobe

    def return_probe(self, **place: Any) -> Kretprobe[Any]:
        """Return a kretprobe that records returns of a function in this ring. The caller registers it.

        `place`: arguments of Kretprobe that name the function, such as `symbol_name`. The registers are
        recorded at the return. If the calling convention leaves some of them undefined at a return, each
        return traps to Python.
        """
        rp: Kretprobe[Any] = Kretprobe(handler=lambda _instance, regs: self._note(rp.address, regs), **place)
        if self._kept.issuperset(self._registers):
            rp.return_program = lambda builder, _way: self._emit(builder, rp.address)
        return rp

    def fprobe(self, filter_: str, **options: Any) -> Fprobe[Any]:
        """Return an fprobe that records the returns of functions in this ring. The caller registers it.

        `filter_`: glob of the names of the functions. `options` are further arguments of Fprobe.
        """
        fp: Fprobe[Any] = Fprobe(
            filter_, exit_handler=lambda _fp, address, regs, _data: self._note(address, regs), **options
        )
        if self._kept.issuperset(self._registers):
            fp.exit_program = lambda builder, _way: self._emit(builder, None)
        return fp

    @property
    def hits(self) -> int:
        """Number of hits recorded so far, including those that were overwritten."""
        return sum(cell[0] for cell in self._cells)

    def entries(self) -> list[RingEntry]:
        """Return the hits that are not overwritten, sorted by CPU and then by age, the oldest first."""
        return [entry for cpu in range(len(self._cells)) for entry in self._entries(cpu)]

    def _entries(self, cpu: int) -> Iterator[RingEntry]:
        hits = self._cells[cpu][0]
        for number in range(max(0, hits - self._capacity), hits):
            count, address, *registers = self._entry.unpack_from(self._views[cpu], self._place(number))
            yield RingEntry(count, address, tuple(registers), cpu)

    def _place(self, number: int) -> int:
        return number % self._capacity << self._shift

    def close(self) -> None:
        """Free the ring's memory; none of its probes may be registered."""
        for view, cell in zip(self._views, self._cells, strict=False):
            view.release()
            self._memory.free_pages(cell[1])
        self._memory.free_percpu(self._offset)

    def _note(self, address: int, regs: Any) -> None:
        """Record a hit that Python handles, with the probed address and the registers of the hit."""
        cpu = self._machine.cpu
        hits = self._cells[cpu][0]
        values = [getattr(regs, name) for name in self._registers]
        self._entry.pack_into(self._views[cpu], self._place(hits), hits, address, *values)
        self._cells[cpu][0] = hits + 1 & (1 << 8 * self._word) - 1

    def _emit(self, builder: ProgramBuilder, address: int | None) -> bool:
        """Emit code that records a hit in the ring, and return True.

        `address`: the probed address; None if the virtual register CALLED contains it.
        """
        word = self._word
        at = _AT, word
        builder.emit(
            LoadPerCpu(_COUNT, self._offset, word),
            Move(_AT, _COUNT),
            ComputeImmediate(Arithmetic.AND, _AT, self._capacity - 1),
            ComputeImmediate(Arithmetic.SHL, _AT, self._shift),
            ComputePerCpu(Arithmetic.ADD, _AT, self._offset + word),
            Store(_AT, 0, _COUNT, word),
            Store(*at, CALLED, word) if address is None else StoreImmediate(*at, address, word),
        )
        for number, name in enumerate(self._registers, _FIXED):
            builder.emit(GetRegister(_VALUE, name), Store(_AT, number * word, _VALUE, word))
        builder.emit(ComputeImmediate(Arithmetic.ADD, _COUNT, 1), StorePerCpu(self._offset, _COUNT, word))
        return True
