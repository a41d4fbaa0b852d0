"""CopyWords: data that the host's routine for repeated copies uses; CopyRange: a range of mapped memory."""

from __future__ import annotations

import ctypes

LONGEST_COPY = 1 << 20
"""Maximum number of words that the host's routine for the guest's `rep movs` copies at once."""


class CopyRange(ctypes.Structure):
    """An entry of a memory map: the range [first, past) of guest addresses, and where it is in this process.

    The host's routine that executes the guest's `rep movs` reads the map. The last entry of the map is all
    zeros.
    """

    _fields_ = (
        ("first", ctypes.c_uint64),
        ("past", ctypes.c_uint64),
        # Value to add to an address of the guest to get the address in this process, modulo 2**64.
        ("displacement", ctypes.c_uint64),
        # Whether the guest may write to the range.
        ("is_writable", ctypes.c_uint64),
    )


class CopyWords(ctypes.Structure):
    """Data of one `rep movs` instruction of the guest, for the host's routine that executes it.

    Unicorn passes the address of this structure to the routine.
    """

    _fields_ = (
        # While it is not 0, the guest copies by itself.
        ("copies_itself", ctypes.c_uint64),
        # Address of the instruction in this process, its machine code, and the mask of the code's bytes. If
        # the code differs, the text is patched, and the guest copies by itself.
        ("text", ctypes.c_uint64),
        ("code", ctypes.c_uint64),
        ("code_mask", ctypes.c_uint64),
        # Address in Unicorn's memory of the stored flags. With the trap flag, the guest copies by itself.
        ("stored_flags", ctypes.c_uint64),
        # Address in Unicorn's memory of the direction: 1, or -1 if the guest copies from high addresses down.
        ("direction", ctypes.c_uint64),
        # Addresses in Unicorn's memory of the registers: number of words, source, and destination.
        ("count", ctypes.c_uint64),
        ("source", ctypes.c_uint64),
        ("destination", ctypes.c_uint64),
        # Mask of a register's bits, and size of a word in bytes.
        ("register_mask", ctypes.c_uint64),
        ("unit", ctypes.c_uint64),
        # Address of the first CopyRange.
        ("map", ctypes.c_uint64),
        # Number of copies that the routine has made.
        ("copies", ctypes.c_uint64),
    )
