"""HostCopies: makes the host execute the guest's copies (`rep movs`) between kernel and user memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from emulated_kernel.machine.cpu.model import CpuModel
from emulated_kernel.machine.cpu.registers import STATE_SLOT, FastRegs, Regs
from emulated_kernel.machine.memory.memory import Memory
from emulated_kernel.machine.native.copy_words import LONGEST_COPY, CopyRange, CopyWords
from emulated_kernel.machine.native.host_code import routine_address
from emulated_kernel.machine.unicorn_engine import HOOK_CODE, Engine
from emulated_kernel.util.abi import Prot

_WORD = (1 << 64) - 1
_DIRECTION_FLAG = 1 << 10
_DIRECTION_AT = 4 * STATE_SLOT + 4
"""Offset in bytes from FastRegs._stored_flags to the direction of string instructions, an int32: 1 or -1.

Both are in Unicorn's CPU structure. `HostCopies` checks the offset.
"""


class HostCopies:
    """Executes the guest's `rep movs` by the host's routine `copy`, with the same result as in the guest.

    Unicorn takes 2.6 ns for each word, the routine 0.1 ns. The guest executes a copy itself if the
    instruction is patched, if the CPU has its trap flag set, if a part of the memory is not mapped, or if the
    destination is not writable.
    """

    def __init__(self, regs: Regs, cpu: CpuModel, memory: Memory, ram: int) -> None:
        """Create an object that executes no copies before take_over().

        `ram`: the address in this process of the guest's physical address 0.
        """
        self._regs = regs
        self._cpu = cpu
        self._memory = memory
        self._ram = ram
        self.all: list[CopyWords] = []
        """For each copy instruction that the host executes, the data that the routine `copy` needs for it."""
        self._map: ctypes.Array[CopyRange] | None = None

    @property
    def count(self) -> int:
        """Number of copies that the host has executed."""
        return sum(int(words.copies) for words in self.all)

    def take_over(self, engine: Engine, fixups: Iterable[int]) -> None:
        """Make the host execute those `rep movs` instructions of the guest that have a fixup, from now on.

        `fixups`: addresses of the instructions in the kernel's exception table. Do nothing if the host has no
        routine `copy`, or if Unicorn's CPU structure can't be accessed directly. Precondition: the guest has
        not run yet.
        """
        code = self._cpu.repeated_copy
        routine = routine_address("copy") if code else None
        regs = self._regs
        if routine is None or not isinstance(regs, FastRegs):
            return
        flags = regs.address_of("_stored_flags")
        if not self._finds_direction(flags + _DIRECTION_AT):
            return
        for address in fixups:
            if self._memory.read(address, len(code)) == code:
                words = self._words(address, flags)
                self.all.append(words)
                user_data = ctypes.addressof(words)
                engine.add_hook(
                    HOOK_CODE, ctypes.c_void_p(routine), at=address, data=user_data, keep=(words,)
                )
        if self.all:
            self._memory.on_change = self._draw_map
            self._draw_map()

    def leave_to_guest(self, left: bool = True) -> None:
        """Make the guest execute all copies itself from now on, so that their instructions can be counted.

        If `left` is False, do the opposite: make the host execute the copies again.
        """
        for words in self.all:
            words.copies_itself = int(left)

    def _finds_direction(self, address: int) -> bool:
        """Return True if Unicorn keeps the direction of the CPU's string instructions at `address`.

        `address` is an address in this process.
        """
        direction = ctypes.c_int32.from_address(address)
        flags = self._regs.flags
        self._regs.flags = flags | _DIRECTION_FLAG
        down = direction.value
        self._regs.flags = flags
        return (down, direction.value) == (-1, 1)

    def _words(self, address: int, flags: int) -> CopyWords:
        code = self._cpu.repeated_copy
        regs = self._regs
        assert isinstance(regs, FastRegs)
        return CopyWords(
            text=self._ram + self._memory.translate(address),
            code=int.from_bytes(code, "little"),
            code_mask=(1 << 8 * len(code)) - 1,
            stored_flags=flags,
            direction=flags + _DIRECTION_AT,
            count=regs.address_of("cx"),
            source=regs.address_of("si"),
            destination=regs.address_of("di"),
            register_mask=(1 << self._cpu.bits) - 1,
            unit=self._cpu.word_size,
        )

    def _draw_map(self) -> None:
        """Store the guest's mapped ranges in the memory map that the copy routine reads."""
        # Invariant: in the routine, the sum of an address in a range and a size does not overflow.
        highest = _WORD - LONGEST_COPY * self._cpu.word_size
        ranges = [each for each in self._memory.ranges if each.end <= highest]
        drawn = (CopyRange * (len(ranges) + 1))()
        for entry, each in zip(drawn, ranges, strict=False):
            entry.first = each.start
            entry.past = each.end
            entry.displacement = self._ram + each.pa - each.start & _WORD
            entry.is_writable = bool(each.prot & Prot.WRITE)
        for words in self.all:
            words.map = ctypes.addressof(drawn)
        self._map = drawn
