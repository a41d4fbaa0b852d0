"""Trap delivery on riscv64: what the CPU itself does, for the library never takes a trap."""

from __future__ import annotations

from emulated_kernel.abi import Vector
from emulated_kernel.machine.cpu import CpuModel
from emulated_kernel.machine.cpu_riscv import (
    CAUSE_LOAD_FAULT,
    INTERRUPT,
    SCAUSE,
    SEPC,
    SR_SIE,
    SR_SPIE,
    SR_SPP,
    STVAL,
    STVEC,
)
from emulated_kernel.machine.delivery import Delivery
from emulated_kernel.machine.engine import Engine
from emulated_kernel.machine.memory import Memory
from emulated_kernel.machine.registers import Regs

_FRAME_SIZE = 36 * 8
"""struct pt_regs, which the handler begins with."""
_PLATFORM_INTERRUPT = 16
_INTERRUPTS = {Vector.WAKE: 1, Vector.TIMER: 5, Vector.WATCHDOG: _PLATFORM_INTERRUPT}
"""Supervisor software and timer interrupt; the others have the numbers that are the platform's own."""
_EXCEPTIONS = {Vector.INVALID_OPCODE: 2, Vector.BREAKPOINT: 3, Vector.PAGE_FAULT: CAUSE_LOAD_FAULT}
_FIRST_INTERRUPT = 32


def cause_of(vector: int, error_code: int) -> int:
    """scause; an exception's error code is its cause, unless it is told without one."""
    if vector < _FIRST_INTERRUPT:
        return error_code or _EXCEPTIONS.get(Vector(vector), vector)
    return INTERRUPT | _INTERRUPTS.get(Vector(vector), _PLATFORM_INTERRUPT + vector - Vector.WATCHDOG)


class RiscvDelivery(Delivery):
    """Sets the trap registers and goes to stvec."""

    def __init__(self, engine: Engine, cpu: CpuModel, memory: Memory, regs: Regs) -> None:
        super().__init__(cpu, memory, regs, None, None)
        self._engine = engine

    @property
    def possible(self) -> bool:
        """Whether the guest has a handler."""
        return self._engine.reg_read(STVEC) != 0

    def enter(self, vector: int, error_code: int, cr2: int) -> None:
        """Interrupt the guest where it stands.

        Raises:
            MemoryFault: its stack can't take the registers; nothing was changed that counts.
        """
        regs, write = self._regs, self._engine.reg_write
        for place in (regs.sp - 8, regs.sp - _FRAME_SIZE):
            self._memory.write(place, bytes(8))
        status = regs.flags
        write(SEPC, regs.ip)
        write(SCAUSE, cause_of(vector, error_code))
        write(STVAL, cr2)
        enabled = SR_SPIE if status & SR_SIE else 0
        regs.flags = status & ~(SR_SIE | SR_SPIE) | SR_SPP | enabled
        regs.ip = self._engine.reg_read(STVEC)
