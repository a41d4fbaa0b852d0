"""TrapWords: host memory that the routine for traps reads; TrapTable: the hash table that it searches."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

FACTOR = 0x9E3779B97F4A7C15
"""Factor of the hash function. The upper bits of address * FACTOR are the index at which a search begins."""
_WORD = (1 << 64) - 1
_FIRST_BITS = 8


class TableWords(ctypes.Structure):
    """Location and size of a TrapTable in this process's memory, for the host's routine for traps."""

    _fields_ = (
        # Address of the first entry: an address in the guest, and the instruction pointer to continue at.
        ("entries", ctypes.c_uint64),
        # Number of low bits to drop from the product with FACTOR.
        ("shift", ctypes.c_uint64),
    )


class TrapWords(ctypes.Structure):
    """Host memory that the routine for traps uses. Unicorn passes its address to the routine."""

    _fields_ = (
        # Addresses in Unicorn's memory: instruction pointer, stored flags (x86), error of an ebreak (RISC-V).
        ("ip", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("error", ctypes.c_uint64),
        # While one of these is not 0, Python gets all traps.
        ("python", ctypes.c_uint64),
        ("callers", ctypes.c_uint64),
        # Address of the ctypes callback.
        ("callback", ctypes.c_uint64),
        # Number of traps that Python did not get.
        ("hits", ctypes.c_uint64),
        ("breakpoints", TableWords),
        ("debug_traps", TableWords),
        # x86: address in the guest at which other breakpoints of kernel mode continue; 0: Python gets them.
        # The code there pushes the frame of the exception from `cells`, and enters the gate.
        ("stub", ctypes.c_uint64),
        # Addresses in Unicorn's memory: stack pointer, its flags with the privilege level, two selectors, and
        # the base of the interrupt descriptor table.
        ("sp", ctypes.c_uint64),
        ("privilege", ctypes.c_uint64),
        ("stack_segment", ctypes.c_uint64),
        ("code_segment", ctypes.c_uint64),
        ("idt", ctypes.c_uint64),
        # The gate that the stub enters: base of the table, address in this process, and contents. If one
        # differs, Python gets the breakpoint.
        ("idt_base", ctypes.c_uint64),
        ("gate", ctypes.c_uint64),
        ("gate_low", ctypes.c_uint64),
        ("gate_high", ctypes.c_uint64),
        # Address in this process of four words: stack segment, stack pointer, code segment, and ip.
        ("cells", ctypes.c_uint64),
        # With the model clock: address in this process of the time in nanoseconds, what a trap and a callback
        # add to it, the routine for traps, and the address of the ctypes callback, which `callback` leads to.
        ("time", ctypes.c_uint64),
        ("trap_ns", ctypes.c_uint64),
        ("handler_ns", ctypes.c_uint64),
        ("routine", ctypes.c_uint64),
        ("handler", ctypes.c_uint64),
        # The routine `arrive` ends a run at one instruction. These are the instruction pointer that Unicorn
        # reports there, that of the instruction, the number of the exception, and the number of ended runs.
        ("arrival", ctypes.c_uint64),
        ("arrival_ip", ctypes.c_uint64),
        ("arrival_vector", ctypes.c_uint64),
        ("arrivals", ctypes.c_uint64),
        # Address in Unicorn's memory of the mark of an exception in flight (x86; 0 elsewhere), uc_emu_stop(),
        # and where the routine goes on with all other exceptions.
        ("in_flight", ctypes.c_uint64),
        ("emu_stop", ctypes.c_uint64),
        ("beyond", ctypes.c_uint64),
        # The routine `enter` enters the kernel at a system call. These are the number of the exception, the
        # addresses of the Checks and Moves of a KernelEntry, and where the routine goes on if it refuses.
        ("entry_vector", ctypes.c_uint64),
        ("checks", ctypes.c_uint64),
        ("moves", ctypes.c_uint64),
        ("refused", ctypes.c_uint64),
    )


class LinkWords(ctypes.Structure):
    """Host memory that describes a jump with a return address (LinkedJump) for the routine for traps."""

    _fields_ = (
        # Address in Unicorn's memory of the register that holds the target; number to add; bits to keep.
        ("target_register", ctypes.c_uint64),
        ("added", ctypes.c_uint64),
        ("kept_bits", ctypes.c_uint64),
        # Address of the register that then holds the return address; the return address.
        ("link_register", ctypes.c_uint64),
        ("link", ctypes.c_uint64),
    )


LINKED = 1
"""Bit that marks a target in a TrapTable that is the address of LinkWords, not of guest code.

The bit is free only on RISC-V and arm64, where all instructions are at even addresses.
"""


class TrapTable:
    """Hash table from the address of a trap to the instruction pointer at which the guest continues.

    Open addressing: the entry of an address is at the index that the hash function gives, or after it. No
    empty entry is between this index and the entry. The address of an empty entry is 0. Python changes the
    table only in a callback or between two runs.
    """

    def __init__(self, words: TableWords) -> None:
        """Make an empty table, and store its location and size in `words`."""
        self._words = words
        self._indices: dict[int, int] = {}
        """Address of a trap -> index of its entry in the table."""
        self._resize(_FIRST_BITS)

    def __contains__(self, address: object) -> bool:
        return address in self._indices

    def __len__(self) -> int:
        return len(self._indices)

    def items(self) -> Iterator[tuple[int, int]]:
        """Yield (address, target) of each entry: the arguments of put()."""
        return ((address, self._entries[2 * index + 1]) for address, index in self._indices.items())

    def put(self, address: int, target: int) -> None:
        """Make the guest continue at `target` after a trap at `address`; replace an older target."""
        assert address, "0 is the address of an empty entry"
        index = self._indices.get(address)
        if index is not None:
            self._entries[2 * index + 1] = target
            return
        if 2 * len(self._indices) >= 1 << self._bits:
            self._resize(self._bits + 1)
        self._insert(address, target)

    def drop(self, address: int) -> None:
        """Remove the entry of `address`, and move the later entries that a search would otherwise miss."""
        hole = self._indices.pop(address)
        entries = self._entries
        index = hole + 1
        while entries[2 * index]:
            moved = entries[2 * index]
            if self._place(moved) <= hole:
                entries[2 * hole] = moved
                entries[2 * hole + 1] = entries[2 * index + 1]
                self._indices[moved] = hole
                hole = index
            index += 1
        entries[2 * hole : 2 * hole + 2] = [0, 0]

    def _place(self, address: int) -> int:
        return (address * FACTOR & _WORD) >> 64 - self._bits

    def _insert(self, address: int, target: int) -> None:
        entries = self._entries
        index = self._place(address)
        while entries[2 * index]:
            index += 1
        entries[2 * index : 2 * index + 2] = [address, target]
        self._indices[address] = index

    def _resize(self, bits: int) -> None:
        """Move the entries to a new table whose hash function has 2**bits values.

        The caller ensures that the number of entries is at most half of 2**bits. The table has room for all
        entries and an empty one after the largest hash value, so that a search never wraps.
        """
        old = list(self.items())
        self._bits = bits
        self._entries = (ctypes.c_uint64 * (2 * ((3 << bits - 1) + 1)))()
        for address, target in old:
            self._insert(address, target)
        self._words.entries = ctypes.addressof(self._entries)
        self._words.shift = 64 - bits
