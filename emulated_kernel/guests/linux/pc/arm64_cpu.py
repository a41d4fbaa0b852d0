"""Arm64LinuxCpu: delivers exceptions and interrupts to a distribution's arm64 kernel.

Unicorn itself executes eret, tlbi, writes of ttbr and virtual interrupts. For all other exceptions, Unicorn
only calls a hook, which must change the CPU's state as a CPU does.
Source: Arm Architecture Reference Manual for A-profile (DDI 0487), AArch64.TakeException.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from emulated_kernel.guests.linux.pc.arm64_cells import Arm64Cells, become_aarch64
from emulated_kernel.guests.linux.pc.linux_cpu import LinuxCpu
from emulated_kernel.machine.cpu import arm64
from emulated_kernel.machine.cpu.registers import FastRegs, Regs
from emulated_kernel.machine.native.entry_words import LOW, WORD, Check, KernelEntry, moved, stored
from emulated_kernel.machine.traps.trap import Trap
from emulated_kernel.machine.unicorn_engine import Engine

_SVC_SYNDROME = arm64.CLASS_SVC << 26 | arm64.FULL_SIZE
_SVC_SIZE = 4
_FROM_USER = 0x400
"""Offset in bytes in the vector table of the handler of synchronous exceptions from user mode."""
_FROM_KERNEL = 0x200
"""Offset in bytes in the vector table of the handler of synchronous exceptions from the kernel."""
_VECTORS = range(0, 0x800, 0x80)
"""Offsets in bytes of all handlers in the vector table."""
_TABLE = 0x0000FFFFFFFFF000


class Arm64LinuxCpu(LinuxCpu):
    """The live CPU of an arm64 machine. It may be used only while the guest is stopped, or in a hook."""

    exception_return: ClassVar[bytes] = bytes.fromhex("e0039fd6")
    """Code of eret."""

    def __init__(self, engine: Engine, regs: Regs, state: int, cells: Arm64Cells) -> None:
        self._engine = engine
        self.regs = regs
        self._general: Any = regs
        """The object `regs`, typed as Any, because Regs does not declare the registers of this processor."""

        def word(offset: int) -> memoryview:
            return memoryview(ctypes.c_uint64.from_address(state + offset)).cast("B").cast("Q")

        def half(offset: int) -> memoryview:
            return memoryview(ctypes.c_uint32.from_address(state + offset)).cast("B").cast("I")

        self.pstate = half(cells.pstate)
        """View of the processor state PSTATE, whose bits arm64.LEVEL are 0 in user mode."""
        self.kernel_tables = word(cells.ttbr1)
        """View of ttbr1_el1, which contains the physical address of the kernel's page tables."""
        self.user_stack = word(cells.sp_el0)
        """View of sp_el0: the stack pointer in user mode, or the running task's address in the kernel."""
        self.syndrome = half(cells.syndrome)
        """View of the word with the syndrome of the exception for which Unicorn calls a hook."""
        self.bad_address = word(cells.bad_address)
        """View of the word with the faulting address of the exception for which Unicorn calls a hook."""
        self._user_tables = word(cells.ttbr0)
        self._kernel_stack = word(cells.sp_el1)
        self._hflags = half(cells.hflags)
        self._kernel_hflags = half(cells.spare)
        self._daif = word(cells.daif)
        self._vbar = word(cells.vbar)
        self._elr = word(cells.elr)
        self._esr = word(cells.esr)
        self._far = word(cells.far)
        self._spsr = word(cells.spsr)
        self._has_interrupt = False
        self._state = state
        self._cells = cells

    @property
    def privilege(self) -> int:
        """Current privilege level, numbered as on x86: 0 in the kernel, 3 in user mode; see LinuxCpu."""
        return 0 if self.pstate[0] & arm64.LEVEL else 3

    @property
    def root(self) -> int:
        """Physical address of the current page tables for user addresses, from ttbr0_el1."""
        return self._user_tables[0] & _TABLE

    @property
    def takes_interrupts(self) -> bool:
        """Whether interrupts are enabled in the CPU, so that it takes a pending one at once; see LinuxCpu."""
        return not self._daif[0] & arm64.IRQ_MASKED

    @contextmanager
    def as_kernel(self) -> Iterator[None]:
        """Give the CPU the kernel's rights during the `with` block; see LinuxCpu."""
        if self.pstate[0] & arm64.LEVEL:
            yield
            return
        kept = self.pstate[0], self._hflags[0]
        self.pstate[0] = arm64.EL1H
        self._hflags[0] = self._kernel_hflags[0]
        try:
            yield
        finally:
            self.pstate[0], self._hflags[0] = kept

    def power_on(self, entry: int, device_tree: int) -> None:
        """Put the CPU into the state that the boot protocol requires at the kernel's start.

        The CPU is at exception level 1. `entry`: physical address of the kernel's first instruction.
        `device_tree`: physical address of the device tree.
        Source: Documentation/arch/arm64/booting.rst.
        """
        become_aarch64(self._engine)
        self.regs.set("x0", device_tree)
        self.regs.ip = entry

    def see_interrupt(self, is_pending: bool) -> None:
        """Make an interrupt pending in the CPU; if `is_pending` is False, make none pending.

        Unicorn delivers a pending interrupt as soon as the guest has enabled interrupts.
        """
        if is_pending != self._has_interrupt:
            self._has_interrupt = is_pending
            value = arm64.HCR_64_BITS | arm64.HCR_IRQ_ROUTED | (arm64.HCR_IRQ_PENDING if is_pending else 0)
            arm64.write_system_register(self._engine, arm64.HCR_EL2, value)

    def set_call(self, values: tuple[int, ...]) -> None:
        """Set the registers of a system call; see LinuxCpu."""
        regs = self._general
        regs.x0, regs.x1, regs.x2, regs.x3, regs.x4, regs.x5, regs.x8, *rest = values
        regs.ip, regs.x7, regs.x19, regs.x20 = rest

    def syscall(self, ip: int, values: tuple[int, ...] | None = None) -> None:
        """Execute the svc instruction at `ip` of the stub; see LinuxCpu.

        spsr_el1 contains the stub's processor state already: the kernel has entered user mode with that
        state, and no instruction of the stub changes it. Only the bits that the CPU does not have are
        cleared.
        """
        if values is not None:
            self.set_call(values)
        self._spsr[0] &= arm64.STATE_BITS
        self._enter(_FROM_USER, _SVC_SYNDROME, ip + _SVC_SIZE)

    def entry(self, ip: int) -> KernelEntry:
        """Return the steps by which the host's native code enters the kernel, as syscall(ip) does.

        `ip`: address of the stub's svc. When the native code runs, Unicorn has already set the CPU's ip to
        the address after the svc.
        """
        assert isinstance(self.regs, FastRegs)
        place = self.regs.address_of
        at = {name: self._state + offset for name, offset in self._cells._asdict().items()}
        return KernelEntry(
            [Check(place("ip"), WORD, ip + _SVC_SIZE), Check(at["pstate"], arm64.LEVEL, 0)],
            [
                moved(at["spsr"], at["spsr"], arm64.STATE_BITS),
                moved(at["sp_el0"], place("sp")),
                moved(place("sp"), at["sp_el1"]),
                moved(at["hflags"], at["spare"], LOW, kept=~LOW),
                moved(at["elr"], place("ip")),
                stored(at["esr"], _SVC_SYNDROME),
                stored(at["pstate"], arm64.EL1H, kept=~LOW),
                stored(at["daif"], arm64.DAIF),
                moved(place("ip"), at["vbar"], added=_FROM_USER),
            ],
        )

    def is_exception_entry(self, address: int) -> bool:
        """Return True if an exception vector is at `address`; see LinuxCpu."""
        return address - self._vbar[0] in _VECTORS

    def raise_exception(self, trap: Trap) -> None:
        """Enter the kernel's handler of the exception `trap`."""
        state = self._engine.reg_read(arm64.PSTATE)
        self._spsr[0] = state
        self._far[0] = trap.cr2
        self._enter(_FROM_KERNEL if state & arm64.LEVEL else _FROM_USER, trap.error_code, trap.address)

    def note_kernel(self) -> None:
        """Store the translator's flags for kernel mode, for later entries into the kernel.

        Call this method when code in kernel mode has caused an exception. Unicorn: a write of the processor
        state by the host does not change the translator's flags. The flags are stored in elr_el3, which the
        guest does not use, so that snapshots contain the flags.
        """
        self._kernel_hflags[0] = self._hflags[0]

    def _enter(self, handler: int, syndrome: int, ip: int) -> None:
        """Take an exception: enter the kernel at the offset `handler` in the vector table.

        `syndrome`: value for esr_el1. `ip`: address to which the handler returns.
        """
        regs = self.regs
        if handler == _FROM_USER:
            self.user_stack[0] = regs.sp
            regs.sp = self._kernel_stack[0]
            self._hflags[0] = self._kernel_hflags[0]
        self._elr[0] = ip
        self._esr[0] = syndrome
        self.pstate[0] = arm64.EL1H
        self._daif[0] = arm64.DAIF
        regs.ip = self._vbar[0] + handler
