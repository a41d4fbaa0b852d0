"""Executable memory of the host with the routines for traps, rdtsc and copies."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from functools import cache

from emulated_kernel.machine.native.routines import ROUTINES

_MAP_FAILED = ctypes.c_void_p(-1).value


PYTHON_TRAPS = "KPROBEFS_PYTHON_TRAPS"
"""Environment variable: if it is set and not empty, Python does the work of all routines, for comparisons."""


def routine_address(name: str) -> int | None:
    """Return the address of the host's routine `name`.

    `name` is that of a routine in the assembler sources, such as "rdtsc". The routine that handles traps is
    named after the guest's family of architectures: "x86", "riscv" or "arm64". Return None if there is no
    such routine for the host's CPU, if the host refuses to map it, or if PYTHON_TRAPS is set.
    """
    if sys.platform != "linux" or os.environ.get(PYTHON_TRAPS):
        return None
    code = ROUTINES.get((os.uname().machine, name))
    return None if code is None else _mapped(code)


@cache
def _mapped(code: bytes) -> int | None:
    """Map code read-only and executable for the life of this process, and return its address.

    Return None if the host refuses the mapping. The code goes through a file in memory. The memory is
    therefore never writable and executable at the same time, and the kernel makes the instruction cache
    coherent.
    """
    try:
        file = os.memfd_create("kprobefs-traps", os.MFD_CLOEXEC)
    except OSError:
        return None
    try:
        os.write(file, code)
        function = ctypes.PyDLL(None).mmap
        function.restype = ctypes.c_void_p
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        rights = mmap.PROT_READ | mmap.PROT_EXEC
        address = function(None, len(code), rights, mmap.MAP_PRIVATE, file, 0)
    finally:
        os.close(file)
    return None if address == _MAP_FAILED else int(address)
