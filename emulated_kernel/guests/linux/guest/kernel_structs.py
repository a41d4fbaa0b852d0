"""KernelStructs: members of the kernel's structures in the guest's memory."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.machine.traps.trap import MemoryFault

_ALIGNMENT = 4
"""Alignment of members that are read and written here."""
_LARGEST = 32
"""Largest number of bytes that are stored at once."""


class KernelStructs:
    """Translates virtual addresses by the page tables that the CPU uses. Raises: MemoryFault (not in RAM)."""

    def __init__(self, machine: LinuxMachine, offsets: Mapping[str, int]) -> None:
        self._cpu = machine.cpu
        self._memory = machine.memory
        self._ram = machine.memory.ram
        self.offsets = offsets

    def physical(self, va: int) -> int:
        """Return the physical address of a member of a structure. Members are aligned."""
        at = self._memory.translate(self._cpu.root, va)
        if at % _ALIGNMENT or at + _LARGEST > len(self._ram):
            raise MemoryFault(va, "not an aligned member")
        return at

    def member(self, address: int, path: str) -> int:
        """Return the physical address of a member, such as `task_struct.pid`, of a structure."""
        return self.physical(address + self.offsets[path])

    def word(self, va: int) -> int:
        """Return the aligned 8 bytes there."""
        return self._memory.words[self.physical(va) >> 3]

    def load_s32(self, physical: int) -> int:
        """Return a signed number of 4 bytes."""
        return int(struct.unpack_from("<i", self._ram, physical)[0])

    def store(self, form: str, physical: int, *values: int) -> None:
        """Store numbers in a format of `struct`."""
        struct.pack_into(form, self._ram, physical, *values)

    def store_bytes(self, physical: int, data: bytes) -> None:
        """Store bytes within one page."""
        self._ram[physical : physical + len(data)] = data
