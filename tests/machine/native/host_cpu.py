"""Emulated CPUs of hosts, which run the native routines, and the addresses that tests give the routines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import pytest
import unicorn
from unicorn import arm64_const, x86_const

from emulated_kernel.machine.native import host_code
from emulated_kernel.machine.native.routines import ROUTINES

CODE_AT, DATA_AT, TABLES_AT, STACK_AT = 0x10000, 0x20000, 0x30000, 0x50000
IP_AT, FLAGS_AT, ERROR_AT, WORDS_AT = DATA_AT, DATA_AT + 8, DATA_AT + 16, DATA_AT + 64
RETURNED, CALLBACK = 0x60000, 0x70000
STOPPED, BEYOND = CALLBACK, CALLBACK + 16
TF = 0x100
NEEDS_ROUTINE = pytest.mark.skipif(
    host_code.routine_address("x86") is None, reason="there is no routine for this kind of host"
)


class HostCpu(ABC):
    """An emulated CPU that takes the part of the host."""

    name: ClassVar[str]
    arguments: ClassVar[Sequence[int]]
    result: ClassVar[int]
    pc: ClassVar[int]
    kept: ClassVar[Sequence[int]]
    """The registers that a routine must keep for its caller."""
    nop: ClassVar[bytes]

    def __init__(self, uc: unicorn.Uc) -> None:
        self.uc = uc
        for at in (CODE_AT, DATA_AT, STACK_AT, RETURNED, CALLBACK):
            uc.mem_map(at, 0x1000)
        uc.mem_map(TABLES_AT, 0x20000)
        # The CPU executes the places where a call ends, so they need instructions.
        for at in (RETURNED, CALLBACK):
            uc.mem_write(at, self.nop * (64 // len(self.nop)))

    @abstractmethod
    def enter(self) -> None:
        """Prepare a call of a routine: set the stack pointer and the return address."""

    @property
    @abstractmethod
    def leaves(self) -> bool:
        """Return True if a return instruction at this point would return to the caller of the routine."""

    def run(self, routine: str, arguments: Sequence[int]) -> None:
        """Call a routine until it returns, calls Python or stops, and check that it kept the registers."""
        uc = self.uc
        code = ROUTINES[self.name, routine]
        uc.mem_write(CODE_AT, code)
        uc.ctl_remove_cache(CODE_AT, CODE_AT + len(code))
        for register, value in zip(self.arguments, arguments, strict=False):
            uc.reg_write(register, value)
        for register in self.kept:
            uc.reg_write(register, register)
        self.enter()
        uc.ctl_exits_enabled(True)
        uc.ctl_set_exits([RETURNED, CALLBACK, BEYOND])
        uc.emu_start(CODE_AT, 0, count=50_000)
        assert [uc.reg_read(register) for register in self.kept] == [*self.kept]


class X86Host(HostCpu):
    """An emulated x86-64 CPU as the host."""

    name = "x86_64"
    arguments = tuple(getattr(x86_const, f"UC_X86_REG_{name}") for name in ("RDI", "RSI", "RDX", "RCX"))
    result, pc = x86_const.UC_X86_REG_RAX, x86_const.UC_X86_REG_RIP
    kept = tuple(
        getattr(x86_const, f"UC_X86_REG_{name}") for name in ("RBX", "RBP", "R12", "R13", "R14", "R15")
    )
    nop = b"\x90"

    def __init__(self) -> None:
        super().__init__(unicorn.Uc(unicorn.UC_ARCH_X86, unicorn.UC_MODE_64))

    def enter(self) -> None:
        self.uc.mem_write(STACK_AT + 0x800, RETURNED.to_bytes(8, "little"))
        self.uc.reg_write(x86_const.UC_X86_REG_RSP, STACK_AT + 0x800)

    @property
    def leaves(self) -> bool:
        return int(self.uc.reg_read(x86_const.UC_X86_REG_RSP)) == STACK_AT + 0x800


class ArmHost(HostCpu):
    """An emulated AArch64 CPU as the host."""

    name = "aarch64"
    arguments = tuple(getattr(arm64_const, f"UC_ARM64_REG_X{number}") for number in range(4))
    result, pc = arm64_const.UC_ARM64_REG_X0, arm64_const.UC_ARM64_REG_PC
    kept = tuple(getattr(arm64_const, f"UC_ARM64_REG_X{number}") for number in range(19, 29))
    nop = bytes.fromhex("1f2003d5")

    def __init__(self) -> None:
        super().__init__(unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM))

    def enter(self) -> None:
        self.uc.reg_write(arm64_const.UC_ARM64_REG_SP, STACK_AT + 0x800)
        self.uc.reg_write(arm64_const.UC_ARM64_REG_X30, RETURNED)

    @property
    def leaves(self) -> bool:
        return int(self.uc.reg_read(arm64_const.UC_ARM64_REG_X30)) == RETURNED
