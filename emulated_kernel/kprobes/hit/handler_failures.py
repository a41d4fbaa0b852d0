"""HandlerFailures: exceptions raised by handlers in Python."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.traps.trap import MemoryFault

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class HandlerFailures:
    """Records the exceptions that handlers in Python raise.

    The hit continues after an exception: the guest can't be left in the middle of the hit, and other handlers
    must run too.
    """

    def __init__(self, machine: ProbedMachine) -> None:
        self._machine = machine
        self._first: BaseException | None = None

    def report(self, kprobe: Kprobe, error: BaseException) -> None:
        """Record `error`, which a handler of `kprobe` raised. The hit goes on as if the handler returned 0.

        If guest memory could not be accessed and the probe has a fault_handler, count a missed hit and call
        the fault_handler, as in Linux (v5.13). If the fault_handler returns a true value, the exception is
        not recorded. Only the first recorded exception of a probe is logged.
        """
        if isinstance(error, MemoryFault) and kprobe.fault_handler is not None:
            kprobe.nmissed += 1
            regs = self._machine.regs
            model = self._machine.model
            trap = model.access_fault(regs.ip, error.address, write=error.write, present=False)
            if kprobe.fault_handler(kprobe, regs, model.trap_number(trap)):
                return
        kprobe.raised += 1
        self.note(error, kprobe.address, is_first=kprobe.raised == 1)

    def note(self, error: BaseException, address: int, *, is_first: bool) -> None:
        """Keep `error` for take() unless an earlier exception is kept; log it if `is_first` is set.

        `is_first`: whether the exception is the probe's first one. `address`: the probed address, for the
        message.
        """
        self._first = self._first or error
        if is_first:
            _log.error("a handler of the probe at %#x failed", address, exc_info=error)

    def reraise_failures(self, call: Callable[[], _T]) -> _T:
        """Call `call` and return its result. Raises: the first exception of a handler during the call."""
        self.take()
        try:
            return call()
        finally:
            failure = self.take()
            if failure is not None:
                raise failure

    def take(self) -> BaseException | None:
        """Return the first exception of a handler since the last call of this method, and forget it.

        Return None if no handler has raised an exception since then.
        """
        failure = self._first
        self._first = None
        return failure
