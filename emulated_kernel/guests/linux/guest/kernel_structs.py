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
    """Accesses members of structures by virtual addresses, through the CPU's page tables.

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
        """Return the physical address of the member `path` of the structure at `address`.

        `path` is, for example, "task_struct.pid".
        """
        return self.physical(address + self.offsets[path])

    def word(self, va: int) -> int:
        """Return the u64 at the virtual address `va`, which must be aligned."""
        return self._memory.words[self.physical(va) >> 3]

    def load_u64(self, physical: int) -> int:
        """Return the u64 at the physical address `physical`, which need not be aligned."""
        return int(struct.unpack_from("<Q", self._ram, physical)[0])

    def load_s32(self, physical: int) -> int:
        """Return the s32 at the physical address `physical`."""
        return int(struct.unpack_from("<i", self._ram, physical)[0])

    def store(self, form: str, physical: int, *values: int) -> None:
        """Store numbers at the physical address `physical`, in the format `form` of the module `struct`."""
        struct.pack_into(form, self._ram, physical, *values)

    def store_bytes(self, physical: int, data: bytes) -> None:
        """Store bytes at the physical address `physical`. They must lie within one page."""
        self._ram[physical : physical + len(data)] = data
