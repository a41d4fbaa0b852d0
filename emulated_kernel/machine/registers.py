"""The live registers of the stopped (or trapped) CPU, under Linux's pt_regs names."""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple, Self

from emulated_kernel.machine import cpu_x86
from emulated_kernel.machine.engine import Engine

_MASK = (1 << 64) - 1
_NAMES = tuple(cpu_x86.REGISTER_IDS)
_IDS = tuple(cpu_x86.REGISTER_IDS.values())
_COUNT = len(_NAMES)
# Not literals where they are used: mypy takes registers, which are no slots, for missing ones.
_NO_SLOTS: tuple[str, ...] = ()
_SLOTS = ("_engine", "orig_ax")
_PACKED = struct.Struct(f"<{_COUNT}Q")
STATE_SIZE = _PACKED.size
"""Bytes from the first register to behind the instruction pointer in the emulator's CPU state."""


class RegisterSet(NamedTuple):
    """A complete set of values; what `Regs.snapshot` returns and calls take."""

    ax: int = 0
    cx: int = 0
    dx: int = 0
    bx: int = 0
    sp: int = 0
    bp: int = 0
    si: int = 0
    di: int = 0
    r8: int = 0
    r9: int = 0
    r10: int = 0
    r11: int = 0
    r12: int = 0
    r13: int = 0
    r14: int = 0
    r15: int = 0
    ip: int = 0
    flags: int = cpu_x86.FLAG_FIXED


class Regs:
    """Registers as attributes; reading and writing them reads and writes the CPU.

    Values are unsigned 64-bit; what is assigned is cut to that. Only valid while the guest is stopped or
    inside a hook. `ApiRegs` works with any library; `FastRegs` costs a tenth of it.
    """

    __slots__ = (*_NO_SLOTS,)

    _engine: Engine
    orig_ax: int
    """-1 unless a system call is entered; no hardware register."""
    ax: int
    cx: int
    dx: int
    bx: int
    sp: int
    bp: int
    si: int
    di: int
    r8: int
    r9: int
    r10: int
    r11: int
    r12: int
    r13: int
    r14: int
    r15: int
    ip: int

    @property
    def flags(self) -> int:
        """EFLAGS, exact: arithmetic flags are computed lazily, so that only the library knows them."""
        return self._engine.reg_read(cpu_x86.EFLAGS)

    @flags.setter
    def flags(self, value: int) -> None:
        self._engine.reg_write(cpu_x86.EFLAGS, value & 0xFFFFFFFF | cpu_x86.FLAG_FIXED)

    @property
    def cs(self) -> int:
        """Code segment selector."""
        return self._engine.reg_read(cpu_x86.CS)

    @property
    def ss(self) -> int:
        """Stack segment selector."""
        return self._engine.reg_read(cpu_x86.SS)

    def get(self, name: str) -> int:
        """A register by name.

        Raises:
            AttributeError: no such register.
        """
        return int(getattr(self, name))

    def set(self, name: str, value: int) -> None:
        """Set a register by name.

        Raises:
            AttributeError: no such register, or cs and ss.
        """
        setattr(self, name, value)

    def snapshot(self) -> RegisterSet:
        """All values now."""
        return RegisterSet._make([*[getattr(self, name) for name in _NAMES], self.flags])

    def restore(self, values: RegisterSet) -> None:
        """Set all registers."""
        for name, value in zip(RegisterSet._fields, values, strict=True):
            setattr(self, name, value)

    def close(self) -> None:
        """Called before the engine goes; using the registers afterwards is an AttributeError, not a crash."""
        del self._engine


class ApiRegs(Regs):
    """Registers through the library's API."""

    __slots__ = (*_SLOTS,)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.orig_ax = _MASK


class FastRegs(Regs, ctypes.Structure):
    """Registers as fields laid over the emulator's own CPU state: no call at all."""

    __slots__ = (*_SLOTS,)
    _fields_ = tuple((name, ctypes.c_uint64) for name in _NAMES)

    @classmethod
    def at(cls, engine: Engine, address: int) -> Self:
        """Over the state at `address`, found by `quirks.find_cpu_state`."""
        regs = cls.from_address(address)
        regs._engine = engine
        regs.orig_ax = _MASK
        return regs

    def snapshot(self) -> RegisterSet:
        """All values now."""
        return RegisterSet._make([*_PACKED.unpack_from(self), self.flags])

    def restore(self, values: RegisterSet) -> None:
        """Set all registers."""
        _PACKED.pack_into(self, 0, *values[:_COUNT])
        self.flags = values.flags

    def close(self) -> None:
        """The CPU state is freed with the engine: nothing may look there any more."""
        super().close()
        self.__class__ = ClosedRegs  # type: ignore[assignment]


class ClosedRegs(Regs, ctypes.Structure):
    """What FastRegs turn into: laid out alike, but there are no registers any more."""

    __slots__ = (*_SLOTS,)


def _api_register(register: int) -> property:
    def get(self: ApiRegs) -> int:
        return self._engine.reg_read(register)

    def put(self: ApiRegs, value: int) -> None:
        self._engine.reg_write(register, value & _MASK)

    return property(get, put)


for _name, _id in cpu_x86.REGISTER_IDS.items():
    setattr(ApiRegs, _name, _api_register(_id))
