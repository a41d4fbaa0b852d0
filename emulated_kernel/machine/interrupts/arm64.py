"""Traps of arm64: handles the breakpoints and exceptions that Unicorn reports."""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.machine.cpu.arm64 import BRK_EXCEPTION, SVC_EXCEPTION, fault
from emulated_kernel.machine.cpu.model import CpuModel
from emulated_kernel.machine.cpu.registers import Regs
from emulated_kernel.machine.interrupts.exceptions import ExceptionState
from emulated_kernel.machine.interrupts.hooks import TrapHooks
from emulated_kernel.machine.run_watchdog import HandlerTime
from emulated_kernel.machine.unicorn_engine import HOOK_INTR, INTR_CALLBACK, Engine

_ABORTS = 3, 4
"""Unicorn's numbers of an instruction abort and of a data abort."""
_SIZE = 4


class Syndrome(ExceptionState):
    """Reads the current exception's syndrome (the value for esr_el1) from Unicorn's CPU structure."""

    def __init__(self, syndrome: memoryview, bad_address: memoryview) -> None:
        self._syndrome = syndrome
        self.bad_address = bad_address
        """View of the word with the faulting address, which only instruction and data aborts set."""

    def take(self) -> int:
        """Return the syndrome of the current exception, which is the value for esr_el1."""
        return int(self._syndrome[0])


class Arm64TrapHooks(TrapHooks):
    """Dispatches exceptions to a handler, to `call_from_user`, or to the guest.

    A brk at an address in `breakpoints` goes to its handler, and a system call of user mode to
    `call_from_user`. When a handler is called, regs.ip is the address after the brk. An exception for the
    guest has the ip that a real CPU reports.
    """

    family = "arm64"

    def __init__(
        self, engine: Engine, cpu: CpuModel, regs: Regs, state: Syndrome, handler_time: HandlerTime
    ) -> None:
        self._syndrome = state
        super().__init__(engine, cpu, regs, state, handler_time)

    def _hook_traps(self) -> None:
        self._hook_natively(HOOK_INTR, INTR_CALLBACK(self._make_interrupt_callback()))

    def _make_interrupt_callback(self) -> Callable[..., object]:
        """Return the callback for exceptions.

        The callback is a closure, because each look-up of an attribute would slow down hits.
        """
        find = self.breakpoints.find
        regs = self.regs
        guest_callers = self.guest_callers
        handler_time = self.handler_time

        def interrupt(engine: int, vector: int, data: int) -> None:
            if handler_time.is_measured:
                handler_time.measure(interrupt, engine, vector, data)
                return
            try:
                ip = regs.ip
                handler = find(ip) if vector == BRK_EXCEPTION else None
                if handler is None:
                    if vector != SVC_EXCEPTION or not self.call_from_user():
                        self._exception(vector)
                    return
                regs.ip = ip + _SIZE
                if guest_callers:
                    self.defer(handler)
                else:
                    handler(regs)
            except BaseException as error:
                self._park(error)

        handler_time.callbacks.add(interrupt.__code__)
        return interrupt

    def _exception(self, vector: int) -> None:
        state = self._syndrome
        address = int(state.bad_address[0]) if vector in _ABORTS else 0
        self.raise_exception(fault(self.regs.ip, state.take(), address))
