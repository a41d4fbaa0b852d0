"""A CPU's complete register values as a tuple with Linux's names; one type an instruction set."""

from __future__ import annotations

from typing import NamedTuple


class RegisterSet(NamedTuple):
    """x86: what `Regs.snapshot` returns and calls take. On i386 r8 to r15 are 0."""

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
    """Bit 1 is always set."""


class RiscvRegisterSet(NamedTuple):
    """riscv64: the same; `ip` is Linux's epc, `flags` its status."""

    ra: int = 0
    sp: int = 0
    gp: int = 0
    tp: int = 0
    t0: int = 0
    t1: int = 0
    t2: int = 0
    s0: int = 0
    s1: int = 0
    a0: int = 0
    a1: int = 0
    a2: int = 0
    a3: int = 0
    a4: int = 0
    a5: int = 0
    a6: int = 0
    a7: int = 0
    s2: int = 0
    s3: int = 0
    s4: int = 0
    s5: int = 0
    s6: int = 0
    s7: int = 0
    s8: int = 0
    s9: int = 0
    s10: int = 0
    s11: int = 0
    t3: int = 0
    t4: int = 0
    t5: int = 0
    t6: int = 0
    ip: int = 0
    flags: int = 0x40100
    """SUM and SPP: the kernel runs, and reaches user memory."""
