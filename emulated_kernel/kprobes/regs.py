"""The registers that handlers get, by architecture: the fields of Linux's struct pt_regs.

These classes exist for type checkers and editors. At run time a handler gets the live registers of the CPU,
or registers that guest code has saved. Both have these attributes. Values are unsigned and as wide as the
architecture's registers. Assigning to an attribute changes the guest.
"""

from __future__ import annotations

from typing import Protocol


class X86Regs(Protocol):
    """The registers of x86_64. Mirrors: arch/x86/include/asm/ptrace.h:struct pt_regs (v6.1)."""

    r15: int
    r14: int
    r13: int
    r12: int
    bp: int
    bx: int
    r11: int
    r10: int
    r9: int
    r8: int
    ax: int
    cx: int
    dx: int
    si: int
    di: int
    orig_ax: int
    ip: int
    cs: int
    flags: int
    sp: int
    ss: int


class I386Regs(Protocol):
    """The registers of i386. Mirrors: arch/x86/include/asm/ptrace.h:struct pt_regs (v6.1)."""

    bx: int
    cx: int
    dx: int
    si: int
    di: int
    bp: int
    ax: int
    ds: int
    es: int
    fs: int
    gs: int
    orig_ax: int
    ip: int
    cs: int
    flags: int
    sp: int
    ss: int


class RiscvRegs(Protocol):
    """The registers of riscv64. Mirrors: arch/riscv/include/asm/ptrace.h:struct pt_regs (v6.1).

    Deviates: `epc` is called `ip`, as on the other architectures.
    """

    ip: int
    ra: int
    sp: int
    gp: int
    tp: int
    t0: int
    t1: int
    t2: int
    s0: int
    s1: int
    a0: int
    a1: int
    a2: int
    a3: int
    a4: int
    a5: int
    a6: int
    a7: int
    s2: int
    s3: int
    s4: int
    s5: int
    s6: int
    s7: int
    s8: int
    s9: int
    s10: int
    s11: int
    t3: int
    t4: int
    t5: int
    t6: int
    status: int
    badaddr: int
    cause: int
    orig_a0: int
