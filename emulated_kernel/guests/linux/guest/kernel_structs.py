"""KernelStructs: reads and writes members of the kernel's structures in the guest's memory."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.machine.traps.trap import MemoryFault

_ALIGNMENT = 4
"""Alignment in bytes of the members that are read and written."""
_LARGEST = 32
"""Maximum number of bytes that are stored at once."""


class KernelStructs:
    """Accesses members by virtual addresses, through the CPU's page tables.

    Raises: MemoryFault (the address is not mapped to RAM).
    """

    def __init__(self, machine: LinuxMachine, offsets: Mapping[str, int]) -> None:
        self._cpu = machine.cpu
        self._memory = machine.memory
        self._ram = machine.memory.ram
        self.offsets = offsets

    def physical(self, va: int) -> int:
        """Return the physical address of the member at the virtual address `va`, which must be aligned."""
        at = self._memory.translate(self._cpu.root, va)
        if at % _ALIGNMENT or at + _LARGEST > len(self._ram):
            raise MemoryFault(va, "not an aligned member")
        return at

    def member(self, address: int, path: str) -> int:
        """Return the physical address of a member ("task_struct.pid") of the structure at `address`."""
        return self.physical(address + self.offsets[path])

    def word(self, va: int) -> int:
        """Return the u64 at an aligned virtual address."""
        return self._memory.words[self.physical(va) >> 3]

    def load_u64(self, physical: int) -> int:
        """Return the u64 at a physical address, which need not be aligned."""
        return int(struct.unpack_from("<Q", self._ram, physical)[0])

    def load_s32(self, physical: int) -> int:
        """Return the s32 at a physical address."""
        return int(struct.unpack_from("<i", self._ram, physical)[0])

    def store(self, form: str, physical: int, *values: int) -> None:
        """Store numbers at a physical address, in the format `form` of the module `struct`."""
        struct.pack_into(form, self._ram, physical, *values)

    def store_bytes(self, physical: int, data: bytes) -> None:
        """Store bytes at a physical address; they must lie within one page."""
        self._ram[physical : physical + len(data)] = data
