"""Traps of RISC-V: handles breakpoints and exceptions, and delivers interrupts through scause and stvec."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from emulated_kernel.machine.cpu.model import CpuModel
from emulated_kernel.machine.cpu.registers import Regs
from emulated_kernel.machine.cpu.riscv import (
    CAUSE_BREAKPOINT,
    CAUSE_ECALL,
    CAUSE_LOAD_FAULT,
    INTERRUPT,
    REPORTED_AHEAD,
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
from emulated_kernel.machine.unicorn_engine import (
    HOOK_INSN_INVALID,
    HOOK_INTR,
    INSN_INVALID_CALLBACK,
    INTR_CALLBACK,
    Engine,
)
from emulated_kernel.util.abi import Vector

_FRAME_SIZE = 36 * 8
"""Size in bytes of struct pt_regs, which the guest's handler stores on the stack first."""
_PLATFORM_INTERRUPT = 16
_INTERRUPTS = {Vector.WAKE: 1, Vector.TIMER: 5, Vector.WATCHDOG: _PLATFORM_INTERRUPT}
"""Vector of x86 -> number of the RISC-V interrupt: software, timer, or the first platform interrupt."""
_EXCEPTIONS = {Vector.INVALID_OPCODE: 2, Vector.BREAKPOINT: 3, Vector.PAGE_FAULT: CAUSE_LOAD_FAULT}
_FIRST_INTERRUPT = 32


def cause_of(vector: int, error_code: int) -> int:
    """Return the value of scause for the exception or interrupt with x86's number `vector`.

    For an exception, an `error_code` other than 0 is already the value of scause, and is returned.
    """
    if vector < _FIRST_INTERRUPT:
        return error_code or _EXCEPTIONS.get(Vector(vector), vector)
    return INTERRUPT | _INTERRUPTS.get(Vector(vector), _PLATFORM_INTERRUPT + vector - Vector.WATCHDOG)


class RiscvDelivery(Delivery):
    """Delivers interrupts: sets sepc, scause, stval and sstatus, and makes the guest continue at stvec."""

    @property
    def possible(self) -> bool:
        """Whether the guest has set a trap handler."""
        return self._engine.reg_read(STVEC) != 0

    def enter(self, vector: int, error_code: int, cr2: int) -> None:
        """Interrupt the guest at its current instruction with the exception or interrupt `vector`.

        `error_code`: the exception's error code. `cr2`: faulting address of a page fault.
        Raises: MemoryFault (the guest's stack can't take the registers; only unused stack was changed).
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
    """Dispatches ebreak to `breakpoints`, with regs.ip advanced by the size of the shortest ebreak.

    Unicorn: a handled ebreak still ends the run with an error, and faults until the end of the run aren't
    reported. If the self-test has found Unicorn's error field, the field is reset after each ebreak.
    Otherwise the run is stopped and started again.
    """

    family = "riscv"
    reported_ahead = REPORTED_AHEAD

    def __init__(
        self, engine: Engine, cpu: CpuModel, regs: Regs, state: ExceptionState, handler_time: HandlerTime
    ) -> None:
        self._error_cell: memoryview | None = None
        self._broke_off = False
        self._size = len(cpu.filler)
        super().__init__(engine, cpu, regs, state, handler_time)

    def use_error_cell(self, address: int) -> None:
        """From now on, reset Unicorn's error field, at `address` in this process, after each ebreak."""
        self._error_cell = memoryview(ctypes.c_int32.from_address(address)).cast("B").cast("i")
        self.words.error = address

    @property
    def is_native(self) -> bool:
        """Whether the machine-code routine of `machine.native`, and not Python, handles Redirects at traps.

        The routine is used only if the address of Unicorn's error field is known, because it must reset this
        field.
        """
        return self._error_cell is not None and super().is_native

    def _hook_traps(self) -> None:
        callback = INTR_CALLBACK(self._make_interrupt_callback())
        self._hooks[HOOK_INTR] = self.engine.add_hook(HOOK_INTR, callback)
        self._hook_natively(HOOK_INSN_INVALID, INSN_INVALID_CALLBACK(self._make_invalid_callback()))
        self.words.beyond = ctypes.cast(callback, ctypes.c_void_p).value

    def run(self, address: int) -> int:
        error = self.engine.start(address)
        while (self._deferred is not None and self._goes_on(self._deferred)) or self._broke_off:
            self._broke_off = False
            error = self.engine.start(self.regs.ip)
        return error

    def end_run(self) -> None:
        super().end_run()
        self._broke_off = False

    def _make_interrupt_callback(self) -> Callable[..., object]:
        return self._guarded(self._call_or_exception)

    def _call_or_exception(self, cause: int) -> None:
        if cause != CAUSE_ECALL or not self.call_from_user():
            self._exception(cause)

    def _make_invalid_callback(self) -> Callable[..., object]:
        handler_time = self.handler_time
        find = self.breakpoints.find
        guest_callers = self.guest_callers
        defer = self.defer
        regs = self.regs
        size = self._size

        def ebreak(engine: int, data: int) -> bool:
            if handler_time.is_measured:
                handler_time.measure(ebreak, engine, data)
                return True
            try:
                cell = self._error_cell
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
                    defer(handler)
                else:
                    regs.ip = ip + size
                    handler(regs)
            except BaseException as error:
                self._park(error)
            return True

        handler_time.callbacks.add(ebreak.__code__)
        return ebreak
