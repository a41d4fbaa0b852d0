"""Model of the arm64 CPU with exception levels 0 (user mode) and 1 (kernel), and access to its registers."""

from __future__ import annotations

import ctypes
from collections import namedtuple
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final

from emulated_kernel.machine.cpu.model import CpuModel
from emulated_kernel.machine.memory.memory import Memory
from emulated_kernel.machine.memory.paging import Arm64PageTables
from emulated_kernel.machine.memory_layout import MemoryLayout
from emulated_kernel.machine.traps.trap import HardwareError, Trap, TrapKind
from emulated_kernel.machine.unicorn_engine import ARCH_ARM64, MODE_ARM, Engine
from emulated_kernel.util.abi import Vector

PSTATE = 265
ELR_EL1 = 267
ELR_EL3 = 269
SP_EL0 = 270
SP_EL1 = 271
TTBR0_EL1 = 274
TTBR1_EL1 = 275
ESR_EL1 = 277
FAR_EL1 = 281
VBAR_EL1 = 287
_CP_REG = 290
_FIRST_X = 199

EL1H = 5
"""Value of PSTATE.M at exception level 1 if sp is sp_el1, as always in Linux."""
LEVEL = 0xC
"""Mask of the bits of PSTATE that contain the exception level."""
DAIF = 0x3C0
"""Mask of the four bits of PSTATE that mask debug exceptions, SErrors, IRQs and FIQs."""
IRQ_MASKED = 0x80
STATE_BITS = 0xF03003DF
"""Mask of the bits of PSTATE that an Armv8.0 CPU has: N, Z, C, V, SS, IL, D, A, I, F and M."""
_CLASS_SHIFT = 26
CLASS_UNKNOWN = 0
CLASS_SVC = 0x15
CLASS_BRK = 0x3C
_ABORTS = (0x20, 0x21, 0x24, 0x25)
"""Exception classes of aborts, which are page faults in Linux.

The order is: instruction abort in user mode and in the kernel, data abort in user mode and in the kernel.
"""
BRK: Final = bytes.fromhex("800020d4")
"""The instruction `brk #4`. Mirrors: arch/arm64/include/asm/brk-imm.h:KPROBES_BRK_IMM (v6.12)."""
BRK_EXCEPTION: Final = 7
"""Unicorn's number of the exception that brk causes."""
SVC_EXCEPTION: Final = 2
"""Unicorn's number of the exception that svc causes."""
FULL_SIZE = 1 << 25
"""Bit IL of a syndrome (esr_el1), which is set if the instruction has 32 bits."""


class _SystemRegister(ctypes.Structure):
    """Unicorn's struct uc_arm64_cp_reg: the encoding of a system register, and the register's value."""

    _fields_ = (
        ("crn", ctypes.c_uint32),
        ("crm", ctypes.c_uint32),
        ("op0", ctypes.c_uint32),
        ("op1", ctypes.c_uint32),
        ("op2", ctypes.c_uint32),
        ("value", ctypes.c_uint64),
    )


Encoding = tuple[int, int, int, int, int]
"""Encoding of a system register: op0, op1, CRn, CRm, op2."""
SPSR_EL1: Final = (3, 0, 4, 0, 0)
HCR_EL2: Final = (3, 4, 1, 1, 0)
HCR_64_BITS: Final = 1 << 31
"""Value of hcr_el2 that makes exception level 1 use AArch64: only bit RW is set."""
HCR_IRQ_ROUTED: Final = 1 << 4
"""Bit IMO of hcr_el2, which enables virtual interrupts."""
HCR_IRQ_PENDING: Final = 1 << 7
"""Bit VI of hcr_el2, which makes a virtual interrupt pending."""
SCR_EL3: Final = (3, 6, 1, 1, 0)
SCR_64_BITS: Final = 0x431
"""Value of scr_el3 that makes the lower exception levels use AArch64 (RW) in non-secure state (NS)."""


def write_system_register(engine: Engine, encoding: Encoding, value: int) -> None:
    """Set the system register that `encoding` identifies to `value`.

    This is for registers to which Unicorn gives no id.
    """
    op0, op1, crn, crm, op2 = encoding
    engine.reg_write_raw(_CP_REG, _SystemRegister(crn, crm, op0, op1, op2, value))


def read_system_register(engine: Engine, encoding: Encoding) -> int:
    """Return the value of the system register that `encoding` identifies.

    This is for registers to which Unicorn gives no id.
    """
    op0, op1, crn, crm, op2 = encoding
    return int(engine.reg_read_raw(_CP_REG, _SystemRegister(crn, crm, op0, op1, op2, 0)).value)


def syndrome_class(syndrome: int) -> int:
    """Return the exception class (EC) in `syndrome`, the value of esr_el1."""
    return syndrome >> _CLASS_SHIFT


def vector_of(syndrome: int) -> Vector:
    """Return the x86 vector that corresponds to an arm64 exception; `syndrome` is the value of esr_el1."""
    kind = syndrome_class(syndrome)
    if kind in _ABORTS:
        return Vector.PAGE_FAULT
    if kind == CLASS_BRK:
        return Vector.BREAKPOINT
    return Vector.INVALID_OPCODE if kind == CLASS_UNKNOWN else Vector.GENERAL_PROTECTION


def fault(ip: int, syndrome: int, address: int = 0) -> Trap:
    """Return the Trap of an exception at `ip`.

    `syndrome`: value of esr_el1. `address`: value of far_el1, the address whose access failed.
    """
    return Trap(TrapKind.FAULT, ip, vector_of(syndrome), syndrome, address)


class Arm64Cpu(CpuModel):
    """Model of an arm64 CPU that runs a distribution's kernel."""

    name = "arm64"
    bits = 64
    engine_mode = (ARCH_ARM64, MODE_ARM)
    page_tables = Arm64PageTables
    layout = MemoryLayout(
        user_buffers=0x0000400000000000,
        direct_map=0xFFFF000000000000,
        direct_map_size=1 << 46,
        host_stacks=0xFFFF500000000000,
        kernel_map=0xFFFF800080000000,
        text_space=0xFFFF400010000000,
        module_space=0xFFFF400020000000,
        host_text=0xFFFF400030000000,
        record_pages=0xFFFF400040000000,
        record_pages_size=32 << 20,
    )
    registers = MappingProxyType({
        **{f"x{number}": _FIRST_X + number for number in range(29)}, "x29": 1, "x30": 2, "sp": 4, "ip": 260,
    })  # fmt: skip
    ip_slot = 32
    register_set: Callable[..., Any] = staticmethod(
        namedtuple("Arm64RegisterSet", (*registers, "flags"), defaults=(*[0] * len(registers), EL1H))
    )
    flags_register = PSTATE
    fixed_flags = 0
    interrupt_flag = 0
    special_registers = MappingProxyType({"badaddr": FAR_EL1, "cause": ESR_EL1})
    aliases = MappingProxyType({"pc": "ip", "lr": "x30", "pstate": "flags", "orig_x0": "orig_ax"})
    arguments = tuple(f"x{number}" for number in range(8))
    variadic_arguments = arguments
    result = "x0"
    call_stack_gap = 48
    halt = bytes.fromhex("7f2003d5")
    breakpoints = (BRK,)
    fetch_unit = 4
    filler = BRK

    def power_on(self, engine: Engine, memory: Memory, per_cpu: int) -> None:  # noqa: ARG002 - it refuses
        """Raise HardwareError, because kprobefs's own kernel has no image for arm64."""
        raise HardwareError("kprobefs's own kernel does not run on arm64")

    def exception(self, engine: Engine, ip: int, vector: int, error_code: int) -> Trap:  # noqa: ARG002
        """Return the trap for an exception at `ip`; `error_code` is the syndrome. Ignore `vector`."""
        return fault(ip, error_code)

    def access_fault(self, ip: int, address: int, *, write: bool, present: bool) -> Trap:
        """Return the trap for a failed data access of the kernel; see CpuModel.

        Mirrors: arch/arm64/include/asm/esr.h:ESR_ELx_EC_DABT_CUR, ESR_ELx_WNR, ESR_ELx_FSC_PERM (v6.12).
        """
        status = 0xF if present else 7
        return fault(ip, 0x25 << _CLASS_SHIFT | FULL_SIZE | int(write) << 6 | status, address)

    def trap_number(self, trap: Trap) -> int:
        """Return the syndrome (esr_el1) of `trap`."""
        return trap.error_code

    def as_called(self, memory: Memory, start: Any, return_address: int) -> Any:  # noqa: ARG002
        return start._replace(x30=return_address)
