"""The riscv64 CPU: supervisor mode with Sv39, traps through stvec and scause, per-CPU data through gp."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from emulated_kernel.machine.cpu.model import CpuModel
from emulated_kernel.machine.memory.memory import Memory
from emulated_kernel.machine.memory.paging import Sv39PageTables
from emulated_kernel.machine.memory_layout import MemoryLayout
from emulated_kernel.machine.traps.trap import Trap, TrapKind
from emulated_kernel.machine.unicorn_engine import ARCH_RISCV, MODE_RISCV64, Engine
from emulated_kernel.util.abi import PAGE_SIZE, Vector

SSTATUS = 133
STVEC = 137
SEPC = 140
SCAUSE = 141
STVAL = 142
SATP = 146
GP = 4
PC = 190
PRIV = 191

SR_SIE = 1 << 1
SR_SPIE = 1 << 5
SR_SPP = 1 << 8
INTERRUPT = 1 << 63
CAUSE_ILLEGAL = 2
CAUSE_BREAKPOINT = 3
CAUSE_ECALL = 8
"""Value of scause for a system call. Unicorn also reports it for the kernel's calls of the firmware."""
CAUSE_FETCH_FAULT = 12
CAUSE_LOAD_FAULT = 13
CAUSE_STORE_FAULT = 15
_PAGE_FAULTS = (CAUSE_FETCH_FAULT, CAUSE_LOAD_FAULT, CAUSE_STORE_FAULT)
_SATP_SV39 = 8 << 60
_SUPERVISOR = 1
_SUM_SPP = 1 << 18 | SR_SPP
"""Value of sstatus in the kernel: SUM, which allows access to user memory, and SPP."""
REPORTED_AHEAD = 4
WFI = bytes.fromhex("73005010")
EBREAK = bytes.fromhex("73001000")
C_EBREAK = bytes.fromhex("0290")


def vector_of(cause: int) -> Vector:
    """Return the x86 vector that stands for a RISC-V exception; `cause` is the value of scause."""
    if cause in _PAGE_FAULTS:
        return Vector.PAGE_FAULT
    if cause == CAUSE_BREAKPOINT:
        return Vector.BREAKPOINT
    return Vector.INVALID_OPCODE if cause == CAUSE_ILLEGAL else Vector.GENERAL_PROTECTION


def fault(ip: int, cause: int, address: int = 0) -> Trap:
    """Return the trap of an exception at `ip`. `cause` and `address` are the values of scause and stval."""
    return Trap(TrapKind.FAULT, ip, vector_of(cause), cause, address)


class RiscvCpu(CpuModel):
    """Base class of the riscv64 models, with Linux's memory map for Sv39."""

    bits = 64
    engine_mode = (ARCH_RISCV, MODE_RISCV64)
    page_tables = Sv39PageTables
    layout = MemoryLayout(
        user_buffers=0x0000003F00000000,
        direct_map=0xFFFFFFD800000000,
        direct_map_size=124 << 30,
        host_stacks=0xFFFFFFC800000000,
        kernel_map=0xFFFFFFFF80000000,
        text_space=0xFFFFFFFFA0000000,
        module_space=0xFFFFFFFFC0000000,
        host_text=0xFFFFFFFFBF000000,
        record_pages=0xFFFFFFD000000000,
        record_pages_size=512 << 20,
    )
    registers = MappingProxyType({
        "ra": 2, "sp": 3, "gp": GP, "tp": 5, "t0": 6, "t1": 7, "t2": 8, "s0": 9, "s1": 10,
        "a0": 11, "a1": 12, "a2": 13, "a3": 14, "a4": 15, "a5": 16, "a6": 17, "a7": 18,
        "s2": 19, "s3": 20, "s4": 21, "s5": 22, "s6": 23, "s7": 24, "s8": 25, "s9": 26, "s10": 27, "s11": 28,
        "t3": 29, "t4": 30, "t5": 31, "t6": 32, "ip": PC,
    })  # fmt: skip
    ip_slot = 63
    register_set: Callable[..., Any] = staticmethod(
        namedtuple("RiscvRegisterSet", (*registers, "flags"), defaults=(*[0] * len(registers), _SUM_SPP))
    )
    flags_register = SSTATUS
    fixed_flags = 0
    special_registers = MappingProxyType({"badaddr": STVAL, "cause": SCAUSE, "sepc": SEPC})
    aliases = MappingProxyType({"epc": "ip", "status": "flags", "orig_a0": "orig_ax"})
    interrupt_flag = SR_SIE
    arguments = ("a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7")
    variadic_arguments = arguments
    result = "a0"
    saved_in_calls = ("gp", "tp")
    call_stack_gap = 48
    hypercall_register = "a7"
    hypercall_arguments = ("a0", "a1", "a2", "a3")
    syscall_arguments = ("a0", "a1", "a2", "a3", "a4", "a5")
    per_cpu_register = GP
    boot_argument = "a1"
    halt = WFI

    def power_on(self, engine: Engine, memory: Memory, per_cpu: int) -> None:
        engine.reg_write(SATP, _SATP_SV39 | memory.tables.root // PAGE_SIZE)
        engine.reg_write(PRIV, _SUPERVISOR)
        engine.reg_write(GP, per_cpu)

    def exception(self, engine: Engine, ip: int, vector: int, error_code: int) -> Trap:  # noqa: ARG002
        """Return the trap for an exception: `vector` is scause, and `error_code` is stval.

        Unicorn: all exceptions are reported with ip four bytes after the instruction.
        """
        ip = ip - REPORTED_AHEAD & (1 << 64) - 1
        return fault(ip, vector, error_code if vector in _PAGE_FAULTS else 0)

    def access_fault(self, ip: int, address: int, *, write: bool, present: bool) -> Trap:  # noqa: ARG002
        return fault(ip, CAUSE_STORE_FAULT if write else CAUSE_LOAD_FAULT, address)

    def trap_number(self, trap: Trap) -> int:
        """Return the value of scause for a trap.

        Mirrors: arch/riscv/mm/fault.c:do_page_fault, which passes scause to kprobes (v6.1).
        """
        return trap.error_code

    def as_called(self, memory: Memory, start: Any, return_address: int) -> Any:  # noqa: ARG002
        return start._replace(ra=return_address)


class Riscv64Cpu(RiscvCpu):
    """Model of riscv64 with compressed instructions; the shortest breakpoint has two bytes."""

    name = "riscv64"
    breakpoints = (C_EBREAK, EBREAK)
    fetch_unit = len(C_EBREAK)
    filler = C_EBREAK


class Riscv64iCpu(RiscvCpu):
    """Model of riscv64 without compressed instructions."""

    name = "riscv64i"
    breakpoints = (EBREAK,)
    fetch_unit = len(EBREAK)
    filler = EBREAK
