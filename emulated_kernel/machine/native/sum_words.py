"""SumWords: host memory that the routines for the bit SUM of riscv64 read.

While SUM is set, kernel code may access user memory. Unicorn drops all cached address translations when an
instruction changes SUM, and the next hundred accesses to other pages then walk the page tables.
"""

from __future__ import annotations

import ctypes

SUM = 1 << 18
"""Mask of the bit SUM in mstatus and sstatus. Source: RISC-V privileged architecture, 4.1.1."""
ENTRY_SIZE = 64
"""Size in bytes of an entry of Unicorn's TLB.

An entry begins with three words: the page's address for reads, for writes and for fetches. A word is all ones
if such an access is not cached.
"""
VICTIMS = 8
"""Number of entries of Unicorn's victim TLB, which holds entries that newer ones displaced from the TLB."""


class SumWords(ctypes.Structure):
    """Host memory that describes one instruction of the guest that changes SUM.

    Unicorn passes the address of this memory to the routine that changes SUM in place of the instruction.
    """

    _fields_ = (
        # Address in this process of the instruction in the text, and its code; other code is left to the CPU.
        ("site", ctypes.c_uint64),
        ("insn", ctypes.c_uint64),
        # Addresses in Unicorn's memory: the register with the bits to change, and mstatus.
        ("operand", ctypes.c_uint64),
        ("mstatus", ctypes.c_uint64),
        # Addresses in Unicorn's memory, for kernel mode: two words with the offset of the table's last entry
        # and the table's address, the entries that others have replaced, and the number of used entries.
        ("tlb", ctypes.c_uint64),
        ("victims", ctypes.c_uint64),
        ("used", ctypes.c_uint64),
        # Number of times that Unicorn did not have to drop all translations.
        ("spared", ctypes.c_uint64),
    )
