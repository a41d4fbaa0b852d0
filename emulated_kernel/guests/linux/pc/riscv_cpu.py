"""RiscvLinuxCpu: privilege levels and exceptions of a RISC-V CPU that runs a distribution's kernel.

Unicorn executes sret, sfence.vma, interrupts, and writes of satp as a CPU does. It leaves exceptions to its
hooks.
Source: The RISC-V Instruction Set Manual, Volume II, "Supervisor-Level ISA".
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from emulated_kernel.guests.linux.pc.linux_cpu import LinuxCpu
from emulated_kernel.guests.linux.pc.riscv_cells import MACHINE_MODE, RiscvCells
from emulated_kernel.machine.cpu import riscv
from emulated_kernel.machine.cpu.registers import FastRegs, Regs
from emulated_kernel.machine.native.entry_words import WORD, Check, KernelEntry, moved, stored
from emulated_kernel.machine.traps.trap import Trap
from emulated_kernel.machine.unicorn_engine import Engine

_SUPERVISOR = 1
_MIDELEG = 119
_MIP = 131
_DELEGATED = 0x222
"""Mask of the interrupts that go to supervisor mode: software, timer and external."""
_ENTRY_CLEARS = riscv.SR_SPP | riscv.SR_SPIE | riscv.SR_SIE
_PAGE_NUMBER = (1 << 44) - 1


class RiscvLinuxCpu(LinuxCpu):
    """The live CPU of a RISC-V machine. It may be used only while the guest is stopped, or in a hook."""

    exception_return: ClassVar[bytes] = bytes.fromhex("73002010")
    """Code of sret."""

    def __init__(self, engine: Engine, regs: Regs, state: int, cells: RiscvCells) -> None:
        self._engine = engine
        self.regs = regs
        self._general: Any = regs
        """The object `regs` as Any, because its type Regs does not declare this processor's registers."""

        def word(offset: int) -> memoryview:
            return memoryview(ctypes.c_uint64.from_address(state + offset)).cast("B").cast("Q")

        self.mode = word(cells.privilege)
        """View of the word with the privilege mode: 0 in user mode, 1 in the kernel."""
        self.scratch = word(cells.sscratch)
        """View of sscratch, with the running task's address while the task is in user mode."""
        self._satp = word(cells.satp)
        self._stvec = word(cells.stvec)
        self._sepc = word(cells.sepc)
        self._scause = word(cells.scause)
        self._stval = word(cells.stval)
        self._mstatus = word(cells.mstatus)
        self._state = state
        self._cells = cells

    @property
    def privilege(self) -> int:
        """Current privilege level, numbered as on x86: 0 in the kernel, 3 in user mode; see LinuxCpu."""
        return 0 if self.mode[0] else 3

    @property
    def root(self) -> int:
        """Physical address of the page tables; see LinuxCpu."""
        return (self._satp[0] & _PAGE_NUMBER) << 12

    @property
    def takes_interrupts(self) -> bool:
        """Whether interrupts are enabled in the CPU, so that it takes a pending one at once; see LinuxCpu."""
        return not self.mode[0] or bool(self._mstatus[0] & riscv.SR_SIE)

    @contextmanager
    def as_kernel(self) -> Iterator[None]:
        """Give the CPU the kernel's rights during the `with` block; see LinuxCpu."""
        kept = self.mode[0]
        self.mode[0] = _SUPERVISOR
        try:
            yield
        finally:
            self.mode[0] = kept

    def power_on(self, entry: int, device_tree: int) -> None:
        """Put the CPU into supervisor mode without paging, as the boot protocol requires.

        `entry` and `device_tree`: physical addresses.
        Source: Documentation/arch/riscv/boot.rst.
        """
        engine = self._engine
        self.mode[0] = MACHINE_MODE
        engine.reg_write(_MIDELEG, _DELEGATED)
        self._mstatus[0] = 0
        self._satp[0] = 0
        self.mode[0] = _SUPERVISOR
        self.regs.set("a0", 0)
        self.regs.set("a1", device_tree)
        self.regs.ip = entry

    def set_pending(self, interrupts: int, *, cleared: int = 0) -> None:
        """Make the interrupts in the mask `interrupts` pending, and the interrupts in `cleared` not pending.

        Unicorn delivers a pending interrupt when the guest has enabled it. Only a write of mip by Unicorn's
        API, in machine mode, interrupts the CPU. A write of the word in Unicorn's CPU state does not.
        """
        engine = self._engine
        kept = self.mode[0]
        self.mode[0] = MACHINE_MODE
        engine.reg_write(_MIP, engine.reg_read(_MIP) & ~cleared | interrupts)
        self.mode[0] = kept

    def set_call(self, values: tuple[int, ...]) -> None:
        """Set the registers of a system call; see LinuxCpu."""
        regs = self._general
        regs.a0, regs.a1, regs.a2, regs.a3, regs.a4, regs.a5, regs.a7, *rest = values
        regs.ip, regs.a6, regs.s1, regs.s0 = rest

    def syscall(self, ip: int, values: tuple[int, ...] | None = None) -> None:
        """Execute the ecall instruction at `ip`; see LinuxCpu."""
        if values is not None:
            self.set_call(values)
        self._enter(riscv.CAUSE_ECALL, ip, 0)

    def entry(self) -> KernelEntry:
        """Return the table by which the native routine enters the kernel at an ecall, as syscall() does.

        When the routine runs, Unicorn has already set ip to the address after the ecall.
        """
        assert isinstance(self.regs, FastRegs)
        ip = self.regs.address_of("ip")
        at = {name: self._state + offset for name, offset in self._cells._asdict().items()}
        status = at["mstatus"]
        enabled = riscv.SR_SPIE // riscv.SR_SIE
        return KernelEntry(
            [Check(at["privilege"], WORD, 0)],
            [
                moved(at["sepc"], ip, added=-riscv.REPORTED_AHEAD),
                stored(at["scause"], riscv.CAUSE_ECALL),
                stored(at["stval"], 0),
                moved(status, status, riscv.SR_SIE, factor=enabled, kept=~_ENTRY_CLEARS),
                stored(at["privilege"], _SUPERVISOR),
                moved(ip, at["stvec"], ~3),
            ],
        )

    def is_exception_entry(self, address: int) -> bool:
        """Return True if `address` is the kernel's one entry for exceptions, in stvec; see LinuxCpu."""
        return address == self._stvec[0] & ~3

    def raise_exception(self, trap: Trap) -> None:
        """Deliver an exception to the guest's trap handler."""
        self._enter(trap.error_code, trap.address, trap.cr2)

    def _enter(self, cause: int, ip: int, value: int) -> None:
        status = self._mstatus[0]
        self._sepc[0] = ip
        self._scause[0] = cause
        self._stval[0] = value
        enabled = riscv.SR_SPIE if status & riscv.SR_SIE else 0
        from_kernel = riscv.SR_SPP if self.mode[0] else 0
        self._mstatus[0] = status & ~_ENTRY_CLEARS | from_kernel | enabled
        self.mode[0] = _SUPERVISOR
        self.regs.ip = self._stvec[0] & ~3
