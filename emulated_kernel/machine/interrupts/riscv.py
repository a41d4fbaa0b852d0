"""Traps of RISC-V: its breakpoint as the emulator reports it, and interrupts by the trap registers."""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.machine.cpu.model import CpuModel
from emulated_kernel.machine.cpu.registers import Regs
from emulated_kernel.machine.cpu.riscv import (
    CAUSE_BREAKPOINT,
    CAUSE_LOAD_FAULT,
    INTERRUPT,
    SCAUSE,
    SEPC,
    SR_SIE,
    SR_SPIE,
    SR_SPP,
    STVAL,
    STVEC,
    fault,
)
from emulated_kernel.machine.interrupts.delivery import Delivery
from emulated_kernel.machine.interrupts.exceptions import ExceptionState
from emulated_kernel.machine.interrupts.hooks import TrapHooks
from emulated_kernel.machine.run_watchdog import HandlerTime
from emulated_kernel.machine.unicorn_engine import Engine
from emulated_kernel.util.abi import Vector

_FRAME_SIZE = 36 * 8
"""struct pt_regs, which the handler begins with."""
_PLATFORM_INTERRUPT = 16
_INTERRUPTS = {Vector.WAKE: 1, Vector.TIMER: 5, Vector.WATCHDOG: _PLATFORM_INTERRUPT}
"""Supervisor software and timer interrupt; the others have the numbers that are the platform's own."""
_EXCEPTIONS = {Vector.INVALID_OPCODE: 2, Vector.BREAKPOINT: 3, Vector.PAGE_FAULT: CAUSE_LOAD_FAULT}
_FIRST_INTERRUPT = 32


def cause_of(vector: int, error_code: int) -> int:
    """scause of a vector; an exception's error code, if it has one, is its cause."""
    if vector < _FIRST_INTERRUPT:
        return error_code or _EXCEPTIONS.get(Vector(vector), vector)
    return INTERRUPT | _INTERRUPTS.get(Vector(vector), _PLATFORM_INTERRUPT + vector - Vector.WATCHDOG)


class RiscvDelivery(Delivery):
    """Sets the trap registers and goes to stvec."""

    @property
    def possible(self) -> bool:
        """Whether the guest has a handler."""
        return self._engine.reg_read(STVEC) != 0

    def enter(self, vector: int, error_code: int, cr2: int) -> None:
        """Interrupt the guest where it stands.

        Raises: MemoryFault (its stack can't take the registers; nothing was changed that counts).
        """
        regs = self._regs
        write = self._engine.reg_write
        for place in (regs.sp - 8, regs.sp - _FRAME_SIZE):
            self._memory.write(place, bytes(8))
        status = regs.flags
        write(SEPC, regs.ip)
        write(SCAUSE, cause_of(vector, error_code))
        write(STVAL, cr2)
        enabled = SR_SPIE if status & SR_SIE else 0
        regs.flags = status & ~(SR_SIE | SR_SPIE) | SR_SPP | enabled
        regs.ip = self._engine.reg_read(STVEC)


class RiscvTrapHooks(TrapHooks):
    """Sends ebreak to `breakpoints`, with regs.ip behind the shortest ebreak there is.

    Unicorn: an ebreak that was dealt with is an error all the same, at the end of the run, and what faults
    until then isn't reported. Where the self-test has found the library's error cell it is reset; else the
    run is broken off and begun again where the guest stands.
    """

    def __init__(
        self, engine: Engine, cpu: CpuModel, regs: Regs, state: ExceptionState, handler_time: HandlerTime
    ) -> None:
        self.error_cell: memoryview | None = None
        self._broke_off = False
        self._size = len(cpu.filler)
        super().__init__(engine, cpu, regs, state, handler_time)

    def run(self, address: int) -> int:
        error = self.engine.start(address)
        while (self._put_off is not None and self._goes_on(self._put_off)) or self._broke_off:
            self._broke_off = False
            error = self.engine.start(self.regs.ip)
        return error

    def end_run(self) -> None:
        super().end_run()
        self._broke_off = False

    def _make_interrupt_callback(self) -> Callable[..., object]:
        return self._guarded(self._exception)

    def _make_invalid_callback(self) -> Callable[..., object]:
        handler_time = self.handler_time
        find = self.breakpoints.get
        guest_callers = self.guest_callers
        put_off = self.put_off
        regs = self.regs
        size = self._size

        def ebreak(engine: int, data: int) -> bool:
            if handler_time.is_measured:
                handler_time.measure(ebreak, engine, data)
                return True
            try:
                cell = self.error_cell
                if cell is None:
                    self._broke_off = True
                else:
                    cell[0] = 0
                ip = regs.ip
                handler = find(ip)
                if handler is None:
                    self.raise_exception(fault(ip, CAUSE_BREAKPOINT))
                elif guest_callers:
                    regs.ip = ip + size
                    put_off(handler)
                else:
                    regs.ip = ip + size
                    handler(regs)
            except BaseException as error:
                self._park(error)
            return True

        handler_time.callbacks.add(ebreak.__code__)
        return ebreak
