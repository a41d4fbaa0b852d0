"""X86Cpu: the common parts of x86_64 and i386, with Unicorn's register numbers and Linux's set-up."""

from __future__ import annotations

import ctypes
from types import MappingProxyType
from typing import Any

from emulated_kernel.machine.cpu.model import CpuModel
from emulated_kernel.machine.cpu.register_sets import RegisterSet
from emulated_kernel.machine.memory.memory import Memory
from emulated_kernel.machine.traps.trap import Trap, TrapKind
from emulated_kernel.machine.unicorn_engine import Engine
from emulated_kernel.util.abi import PAGE_SIZE, Vector

EFLAGS = 25
CS = 11
SS = 49
DS = 17
ES = 28
FS = 32
GS = 33
CR0 = 50
CR2 = 52
CR3 = 53
CR4 = 54
IDTR = 242
GDTR = 243
MSR = 248
FS_BASE = 250
GS_BASE = 251

FLAG_FIXED = 1 << 1
FLAG_TF = 1 << 8
FLAG_IF = 1 << 9
FLAG_NT = 1 << 14
FLAG_RF = 1 << 16
HLT = b"\xf4"
INT3 = b"\xcc"

CR0_PAGED = 0x80050033
"""Value of CR0 in the kernel: PG AM WP NE ET MP PE. WP makes read-only pages read-only for the kernel too."""
CR4_PAE_PGE_SSE = 0x6A0
CR4_SMAP = 1 << 21
EFER_NX = 0x800
_MSR_EFER = 0xC0000080
_FIRST_INTERRUPT = 32
_INT_N_SIZE = 2


class Msr(ctypes.Structure):
    """Unicorn's structure for a model-specific register."""

    _fields_ = (("rid", ctypes.c_uint32), ("value", ctypes.c_uint64))


class TableRegister(ctypes.Structure):
    """Unicorn's structure for GDTR, IDTR or TR."""

    _fields_ = (
        ("selector", ctypes.c_uint16),
        ("base", ctypes.c_uint64),
        ("limit", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
    )


class X86Cpu(CpuModel):
    """Base class of the models of x86 CPUs."""

    register_set = RegisterSet
    flags_register = EFLAGS
    fixed_flags = FLAG_FIXED
    interrupt_flag = FLAG_IF
    special_registers = MappingProxyType({"cs": CS, "ss": SS, "ds": DS, "es": ES, "fs": FS, "gs": GS})
    result = "ax"
    call_stack_gap = 40
    """Number of bytes for the return address and stack arguments of a function that the host calls.

    It is 8 modulo 16, as the ABI of x86_64 requires of the stack pointer at a function's entry.
    """
    hypercall_register = "ax"
    halt = HLT
    breakpoints = (INT3,)
    filler = INT3
    trap_flag = FLAG_TF
    cleared_flags = FLAG_TF | FLAG_IF | FLAG_NT | FLAG_RF

    def exception(self, engine: Engine, ip: int, vector: int, error_code: int) -> Trap:
        if vector >= _FIRST_INTERRUPT:
            # `int n` raises #GP, because the guest's IDT has no gates.
            general_protection = vector << 3 | 2
            return Trap(TrapKind.FAULT, ip - _INT_N_SIZE, Vector.GENERAL_PROTECTION, general_protection)
        cr2 = engine.reg_read(CR2) if vector == Vector.PAGE_FAULT else 0
        return Trap(TrapKind.FAULT, ip, vector, error_code, cr2)

    def access_fault(self, ip: int, address: int, *, write: bool, present: bool) -> Trap:
        return Trap(TrapKind.FAULT, ip, Vector.PAGE_FAULT, present | write << 1, address)

    def as_called(self, memory: Memory, start: Any, return_address: int) -> Any:
        memory.write_word(start.sp, return_address)
        return start

    def _page_on(self, engine: Engine, memory: Memory, efer: int) -> None:
        engine.reg_write(CR4, CR4_PAE_PGE_SSE)
        engine.reg_write_raw(MSR, Msr(_MSR_EFER, efer))
        engine.reg_write(CR3, memory.tables.root)
        engine.reg_write(CR0, CR0_PAGED)

    def _load_gdt(self, engine: Engine, memory: Memory, gdt: bytes) -> None:
        """Write the descriptor table `gdt` to a newly allocated page, and make GDTR refer to it."""
        where = self.layout.direct_map + memory.host_pages.alloc(PAGE_SIZE)
        memory.write(where, gdt)
        engine.reg_write_raw(GDTR, TableRegister(0, where, len(gdt) - 1, 0))
