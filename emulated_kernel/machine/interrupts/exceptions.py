"""Access to Unicorn's hidden exception state: the error code, and the mark that an exception is in flight.

While the mark is set, a further exception is a double fault. Unicorn leaves the mark set after it has called
a hook for the exception, so the host must clear it.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

from emulated_kernel.machine.cpu.registers import Regs
from emulated_kernel.machine.unicorn_engine import Engine

NONE_IN_FLIGHT = -1


class ExceptionState(Protocol):
    """Interface of an object that reads data about the exception for which Unicorn calls a hook."""

    def take(self) -> int:
        """Return the error code and acknowledge the exception, so that the next one isn't a double fault."""


class NoExceptionState:
    """Placeholder until the self-test has found Unicorn's exception state."""

    def take(self) -> int:
        """Return 0 as the error code, and clear no mark."""
        return 0


class LiveExceptionState:
    """Accesses the error code, and the mark that an exception is in flight, in Unicorn's CPU structure."""

    def __init__(self, error_code_address: int, in_flight_address: int) -> None:
        self._error = memoryview(ctypes.c_int32.from_address(error_code_address)).cast("B").cast("i")
        self._in_flight = memoryview(ctypes.c_int32.from_address(in_flight_address)).cast("B").cast("i")

    def take(self) -> int:
        """Return the error code, and clear the mark that an exception is in flight."""
        self._in_flight[0] = NONE_IN_FLIGHT
        return self._error[0] & 0xFFFFFFFF


class ContextExceptionState:
    """Accesses the error code, and the mark that an exception is in flight, in a saved context of Unicorn.

    API calls save the context and restore it after it was changed; this takes 1 us.
    """

    def __init__(self, engine: Engine, error_code_offset: int, in_flight_offset: int) -> None:
        self._engine = engine
        context = engine.context_alloc()
        self._context = context
        assert context.value is not None
        self._error = ctypes.c_int32.from_address(context.value + error_code_offset)
        self._in_flight = ctypes.c_int32.from_address(context.value + in_flight_offset)

    def take(self) -> int:
        """Return the error code, and clear the mark that an exception is in flight."""
        self._engine.context_save(self._context)
        self._in_flight.value = NONE_IN_FLIGHT
        self._engine.context_restore(self._context)
        return self._error.value & 0xFFFFFFFF


class CleanContextExceptionState:
    """Clears Unicorn's exception state by restoring a context that was saved before any exception.

    It is used if the error code and the mark were not found in Unicorn's memory. The registers are kept, but
    error codes are 0, and SSE state is lost at a fault.
    """

    def __init__(self, engine: Engine, regs: Regs) -> None:
        self._engine = engine
        self._regs = regs
        self._clean = engine.context_alloc()
        engine.context_save(self._clean)

    def take(self) -> int:
        """Clear Unicorn's mark that an exception is in flight, by restoring a context in which it is clear.

        Return 0, because the error code is not known.
        """
        values = self._regs.snapshot()
        self._engine.context_restore(self._clean)
        self._regs.restore(values)
        return 0
