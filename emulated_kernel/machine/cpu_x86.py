"""The x86_64 CPU as unicorn numbers it, and the state Linux runs its kernel in."""

from __future__ import annotations

import ctypes
import struct

from emulated_kernel.abi import Vector
from emulated_kernel.machine.engine import Engine
from emulated_kernel.machine.traps import Trap, TrapKind

REGISTER_IDS = {
    "ax": 35, "cx": 38, "dx": 40, "bx": 37, "sp": 44, "bp": 36, "si": 43, "di": 39,
    "r8": 106, "r9": 107, "r10": 108, "r11": 109, "r12": 110, "r13": 111, "r14": 112, "r15": 113,
    "ip": 41,
}  # fmt: skip
"""Linux's pt_regs name to UC_X86_REG_*, in the order of the emulator's own CPU state (8 bytes each)."""

EFLAGS, CS, SS, DS, ES = 25, 11, 49, 17, 28
CR0, CR2, CR3, CR4 = 50, 52, 53, 54
GDTR, MSR, FS_BASE, GS_BASE = 243, 248, 250, 251

KERNEL_CS, KERNEL_DS = 0x10, 0x18
FLAG_FIXED, FLAG_TF, FLAG_IF, FLAG_NT, FLAG_RF = 1 << 1, 1 << 8, 1 << 9, 1 << 14, 1 << 16
HLT = 0xF4
INT3 = 0xCC

_CANONICAL_BITS = 47
_CR0_PAGED = 0x80050033
"""PG AM WP NE ET MP PE: WP makes read-only pages read-only for the kernel too."""
_CR4_PAE_PGE_SSE = 0x6A0
_MSR_EFER = 0xC0000080
_EFER_LONG_NX = 0xD01
_GDT = struct.pack(
    "<7Q",
    0,
    0x00CF9B000000FFFF,  # 32-bit kernel code
    0x00AF9B000000FFFF,  # kernel code
    0x00CF93000000FFFF,  # kernel data
    0x00CFFB000000FFFF,  # 32-bit user code
    0x00CFF3000000FFFF,  # user data
    0x00AFFB000000FFFF,  # user code
)
GDT_SIZE = len(_GDT)


class _Msr(ctypes.Structure):
    _fields_ = (("rid", ctypes.c_uint32), ("value", ctypes.c_uint64))


class _TableRegister(ctypes.Structure):
    _fields_ = (
        ("selector", ctypes.c_uint16),
        ("base", ctypes.c_uint64),
        ("limit", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
    )


def access_fault(ip: int, address: int, *, write: bool, present: bool) -> Trap:
    """What a data access of the kernel's raises that can't be made; `present`: the page is mapped.

    Unicorn: a non-canonical address is #GP for the stack too, where a CPU has #SS.
    """
    if address >> _CANONICAL_BITS not in (0, (1 << 64 - _CANONICAL_BITS) - 1):
        return Trap(TrapKind.FAULT, ip, Vector.GENERAL_PROTECTION)
    return Trap(TrapKind.FAULT, ip, Vector.PAGE_FAULT, present | write << 1, address)


def gdt() -> bytes:
    """The descriptor table that `enter_long_mode` expects in guest memory."""
    return _GDT


def enter_long_mode(engine: Engine, page_table: int, gdt_va: int) -> None:
    """Turn paging with NX on and load the kernel's segments; the table must be mapped at `gdt_va`."""
    engine.reg_write(CR4, _CR4_PAE_PGE_SSE)
    engine.reg_write_raw(MSR, _Msr(_MSR_EFER, _EFER_LONG_NX))
    engine.reg_write(CR3, page_table)
    engine.reg_write(CR0, _CR0_PAGED)
    engine.reg_write_raw(GDTR, _TableRegister(0, gdt_va, GDT_SIZE - 1, 0))
    for segment, selector in ((CS, KERNEL_CS), (SS, KERNEL_DS), (DS, 0), (ES, 0)):
        engine.reg_write(segment, selector)
