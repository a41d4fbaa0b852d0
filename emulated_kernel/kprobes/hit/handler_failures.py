"""HandlerFailures: what handlers in Python have raised."""

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
    """The hit goes on: the guest can't be left in its middle, and other handlers have a right to theirs."""

    def __init__(self, machine: ProbedMachine) -> None:
        self._machine = machine
        self._first: BaseException | None = None

    def report(self, kprobe: Kprobe, error: BaseException) -> None:
        """A handler raised: the hit goes on as if it had returned 0, and the first of a probe is logged.

        A fault in guest memory is offered to its fault_handler, and counts as missed, as in Linux (v5.13).
        """
        if isinstance(error, MemoryFault) and kprobe.fault_handler is not None:
            kprobe.nmissed += 1
            regs = self._machine.regs
            model = self._machine.model
            trap = model.access_fault(regs.ip, error.address, write=error.write, present=False)
            if kprobe.run_fault_handler(regs, model.trap_number(trap)):
                return
        kprobe.raised += 1
        self.note(error, kprobe.address, is_first=kprobe.raised == 1)

    def note(self, error: BaseException, address: int, *, is_first: bool) -> None:
        """Keep what a handler raised for `take`, and log it once a probe."""
        self._first = self._first or error
        if is_first:
            _log.error("a handler of the probe at %#x failed", address, exc_info=error)

    def raised_behind(self, call: Callable[[], _T]) -> _T:
        """What a call returns. Raises: as it, what the first handler raised that failed meanwhile."""
        self.take()
        try:
            return call()
        finally:
            failure = self.take()
            if failure is not None:
                raise failure

    def take(self) -> BaseException | None:
        """What the first handler raised that failed since the last call, for a caller to raise."""
        failure = self._first
        self._first = None
        return failure
