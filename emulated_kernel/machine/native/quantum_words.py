"""QuantumWords: the host memory in which a routine counts a guest's instructions."""

from __future__ import annotations

import ctypes


class QuantumWords(ctypes.Structure):
    """Host memory that the routine `end_quantum` uses. Unicorn passes its address to the routine."""

    _fields_ = (
        # The run ends before the instruction with this number, counted from the next one; if it is 0, no run
        # ends.
        ("left", ctypes.c_uint64),
        # The run also ends before the instruction at this address.
        ("end", ctypes.c_uint64),
        # While one of these is not 0, Python looks at each instruction. Another thread may set `overdue`.
        ("is_bounded", ctypes.c_uint64),
        ("overdue", ctypes.c_uint64),
        # Address of the ctypes callback.
        ("count_in_python", ctypes.c_uint64),
    )
