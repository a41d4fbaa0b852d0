"""What the library hides about an exception: its error code, and the "in flight" mark it never takes back."""

from __future__ import annotations

import ctypes
from typing import Protocol

from emulated_kernel.machine.cpu.registers import Regs
from emulated_kernel.machine.unicorn_engine import Engine

NONE_IN_FLIGHT = -1


class ExceptionState(Protocol):
    """Reading and acknowledging the exception that a hook is called for."""

    def take(self) -> int:
        """The exception's error code; afterwards the next exception is a first one again."""


class NoExceptionState:
    """Until the self-test has found the cells."""

    def take(self) -> int:
        """Always 0; acknowledges nothing."""
        return 0


class LiveExceptionState:
    """The two cells in the emulator's own CPU state."""

    def __init__(self, error_code_address: int, in_flight_address: int) -> None:
        self._error = memoryview(ctypes.c_int32.from_address(error_code_address)).cast("B").cast("i")
        self._in_flight = memoryview(ctypes.c_int32.from_address(in_flight_address)).cast("B").cast("i")

    def take(self) -> int:
        """The error code, read and acknowledged in place."""
        self._in_flight[0] = NONE_IN_FLIGHT
        return self._error[0] & 0xFFFFFFFF


class ContextExceptionState:
    """The same two cells, reached by saving a context, patching it and restoring it: 1 us, API only."""

    def __init__(self, engine: Engine, error_code_offset: int, in_flight_offset: int) -> None:
        self._engine = engine
        self._context = context = engine.context_alloc()
        assert context.value is not None
        self._error = ctypes.c_int32.from_address(context.value + error_code_offset)
        self._in_flight = ctypes.c_int32.from_address(context.value + in_flight_offset)

    def take(self) -> int:
        """The error code. Clears the mark that an exception is in flight: the CPU's context, written back."""
        self._engine.context_save(self._context)
        self._in_flight.value = NONE_IN_FLIGHT
        self._engine.context_restore(self._context)
        return self._error.value & 0xFFFFFFFF


class CleanContextExceptionState:
    """For a library whose cells were not found: a context saved before any exception, with today's registers.

    Error codes are then 0, and SSE state is lost at a fault.
    """

    def __init__(self, engine: Engine, regs: Regs) -> None:
        self._engine = engine
        self._regs = regs
        self._clean = engine.context_alloc()
        engine.context_save(self._clean)

    def take(self) -> int:
        """Always 0."""
        values = self._regs.snapshot()
        self._engine.context_restore(self._clean)
        self._regs.restore(values)
        return 0
