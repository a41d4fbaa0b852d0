"""RegisterSet: the values of all registers of an x86 CPU as a tuple with Linux's names."""

from __future__ import annotations

from emulated_kernel.util.fast_named_tuple import NamedTuple


class RegisterSet(NamedTuple):
    """Register values of x86_64 and i386, which `Regs.snapshot` returns. On i386, r8 to r15 are 0."""

    ax: int = 0
    cx: int = 0
    dx: int = 0
    bx: int = 0
    sp: int = 0
    bp: int = 0
    si: int = 0
    di: int = 0
    r8: int = 0
    r9: int = 0
    r10: int = 0
    r11: int = 0
    r12: int = 0
    r13: int = 0
    r14: int = 0
    r15: int = 0
    ip: int = 0
    flags: int = 2
    """Value of eflags or rflags. Bit 1 is always set."""
