"""Arm64LinuxCpu: exception levels and exceptions of an arm64 CPU that runs a distribution's kernel.

Unicorn executes eret, tlbi, ttbr writes and virtual interrupts as a CPU does. It leaves exceptions to its
hooks.
Source: Arm Architecture Reference Manual for A-profile (DDI 0487), AArch64.TakeException.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from emulated_kernel.guests.linux.guest_abi import ARM64
from emulated_kernel.guests.linux.pc.arm64_cells import Arm64Cells, become_aarch64
from emulated_kernel.guests.linux.pc.linux_cpu import LinuxCpu
from emulated_kernel.machine.cpu import arm64
from emulated_kernel.machine.cpu.registers import Regs
from emulated_kernel.machine.traps.trap import Trap
from emulated_kernel.machine.unicorn_engine import Engine

_CALL = (*ARM64.call, "ip", ARM64.counter, *ARM64.kept)
"""Names of the registers that a system call sets."""
_SVC_SYNDROME = arm64.CLASS_SVC << 26 | arm64.FULL_SIZE
_SVC_SIZE = 4
_FROM_USER = 0x400
"""Offset in the vector table of the handler of exceptions of user mode."""
_FROM_KERNEL = 0x200
_TABLE = 0x0000FFFFFFFFF000


class Arm64LinuxCpu(LinuxCpu):
    """The live CPU of an arm64 machine. Use it only while the guest is stopped, or inside a hook."""

    def __init__(self, engine: Engine, regs: Regs, state: int, cells: Arm64Cells) -> None:
        self._engine = engine
        self.regs = regs

        def word(offset: int) -> memoryview:
            return memoryview(ctypes.c_uint64.from_address(state + offset)).cast("B").cast("Q")

        def half(offset: int) -> memoryview:
            return memoryview(ctypes.c_uint32.from_address(state + offset)).cast("B").cast("I")

        self.pstate = half(cells.pstate)
        """View of the processor state: its bits of arm64.LEVEL are 0 in user mode."""
        self.kernel_tables = word(cells.ttbr1)
        """View of ttbr1_el1, the address of the kernel's page tables."""
        self.user_stack = word(cells.sp_el0)
        """View of sp_el0, in which Linux keeps the running task while it is in the kernel."""
        self.syndrome = half(cells.syndrome)
        """View of the syndrome of the exception for which Unicorn calls a hook."""
        self.bad_address = word(cells.bad_address)
        """View of the faulting address of the exception for which Unicorn calls a hook."""
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

    @property
    def privilege(self) -> int:
        """Current privilege level: 0 in the kernel, 3 in user mode; see LinuxCpu."""
        return 0 if self.pstate[0] & arm64.LEVEL else 3

    @property
    def root(self) -> int:
        """Physical address of the page tables for user addresses; see Arm64Memory."""
        return self._user_tables[0] & _TABLE

    @property
    def takes_interrupts(self) -> bool:
        """Whether the CPU takes an interrupt now; see LinuxCpu."""
        return not self._daif[0] & arm64.IRQ_MASKED

    @contextmanager
    def as_kernel(self) -> Iterator[None]:
        """Give the CPU the kernel's rights during the block; see LinuxCpu."""
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
        """Put the CPU into the state that the boot protocol requires, at exception level 1.

        `entry` and `device_tree`: physical addresses.
        Source: Documentation/arch/arm64/booting.rst.
        """
        become_aarch64(self._engine)
        self.regs.set("x0", device_tree)
        self.regs.ip = entry

    def see_interrupt(self, is_pending: bool) -> None:
        """Make an interrupt pending or not; the library delivers it when the guest takes interrupts."""
        if is_pending != self._has_interrupt:
            self._has_interrupt = is_pending
            value = arm64.HCR_64_BITS | arm64.HCR_IRQ_ROUTED | (arm64.HCR_IRQ_PENDING if is_pending else 0)
            arm64.write_system_register(self._engine, arm64.HCR_EL2, value)

    def set_call(self, values: tuple[int, ...]) -> None:
        """Set the registers of a system call; see LinuxCpu."""
        for name, value in zip(_CALL, values, strict=True):
            self.regs.set(name, value)

    def syscall(self, ip: int, values: tuple[int, ...] | None = None) -> None:
        """Execute the svc instruction at `ip`; see LinuxCpu."""
        if values is not None:
            self.set_call(values)
        self._enter(_SVC_SYNDROME, ip + _SVC_SIZE)

    def raise_exception(self, trap: Trap) -> None:
        """Deliver an exception to the guest's handler."""
        self._far[0] = trap.cr2
        self._enter(trap.error_code, trap.address)

    def note_kernel(self) -> None:
        """Note the state of the translator at an exception in the kernel, for later entries.

        Unicorn: the translator's flags do not follow a write of the processor state. They are kept in
        elr_el3, a register that only snapshots use.
        """
        self._kernel_hflags[0] = self._hflags[0]

    def _enter(self, syndrome: int, ip: int) -> None:
        state = self._engine.reg_read(arm64.PSTATE)
        vector = self._vbar[0]
        if state & arm64.LEVEL:
            vector += _FROM_KERNEL
        else:
            vector += _FROM_USER
            regs = self.regs
            self.user_stack[0] = regs.sp
            regs.sp = self._kernel_stack[0]
            self._hflags[0] = self._kernel_hflags[0]
        self._spsr[0] = state
        self._elr[0] = ip
        self._esr[0] = syndrome
        self.pstate[0] = arm64.EL1H
        self._daif[0] = arm64.DAIF
        self.regs.ip = vector
