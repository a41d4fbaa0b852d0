"""Regs: the live registers of the stopped or trapped CPU, with the names of Linux's pt_regs."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar

from emulated_kernel.machine.cpu.model import CpuModel
from emulated_kernel.machine.cpu.register_sets import RegisterSet
from emulated_kernel.machine.unicorn_engine import Engine

__all__ = ["STATE_SLOT", "RegisterSet", "Regs", "api_regs", "fast_regs"]

# Variables, not literals: with literals mypy would report registers, which aren't slots, as missing.
_NO_SLOTS: tuple[str, ...] = ()
_SLOTS = ("_engine", "orig_ax")
STATE_SLOT = 8
"""Size in bytes of a register in Unicorn's CPU structure, for registers of any width."""


class Regs:
    """The registers of the current CPU as attributes; an access to an attribute accesses the CPU.

    Values are unsigned, and assigned values are truncated to the CPU's width. Registers are only valid while
    the guest is stopped or in a hook. i386 has no r8 to r15. Two functions make such an object: api_regs()
    works with any version of Unicorn; the object of fast_regs() is ten times as fast.
    """

    __slots__ = (*_NO_SLOTS,)

    _names: ClassVar[tuple[str, ...]]
    _absent: ClassVar[tuple[int, ...]]
    """A zero for each register of RegisterSet that this CPU does not have, such as r8 on i386."""
    _register_set: ClassVar[Callable[..., Any]]
    _flags_register: ClassVar[int]
    _flags_mask: ClassVar[int]
    _fixed_flags: ClassVar[int]
    _trap_flag: ClassVar[int]

    _engine: Engine
    orig_ax: int
    """Number of the system call that a task has entered, or -1 (as an unsigned value) otherwise.

    This is a field of Linux's pt_regs, not a register of the CPU. On riscv64, Linux calls it orig_a0.
    """
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

    cs: int
    """Code segment selector."""
    ss: int
    ds: int
    es: int
    fs: int
    """On i386, selector of the segment with the kernel's per-CPU data."""
    gs: int
    """On i386, selector of the segment with user space's thread data."""

    @property
    def flags(self) -> int:
        """Value of the flags register (riscv64: sstatus).

        It is read through Unicorn's API, because Unicorn computes the flags of x86 only when they are read.
        """
        return self._engine.reg_read(self._flags_register)

    @flags.setter
    def flags(self, value: int) -> None:
        self._engine.reg_write(self._flags_register, value & self._flags_mask | self._fixed_flags)

    def step(self, on: bool) -> None:
        """Set the trap flag if `on` is True, otherwise clear it. The CPU must have a trap flag."""
        flags = self.flags
        self.flags = flags | self._trap_flag if on else flags & ~self._trap_flag

    def get(self, name: str) -> int:
        """Return the value of the register called `name`. Raises: AttributeError (no such register)."""
        return int(getattr(self, name))

    def set(self, name: str, value: int) -> None:
        """Set the register called `name`. Raises: AttributeError (no such register, or a read-only one)."""
        setattr(self, name, value)

    def snapshot(self) -> Any:
        """Return the current values of all registers, as a named tuple of the type CpuModel.register_set."""
        *general, ip = [getattr(self, name) for name in self._names]
        return self._register_set(*general, *self._absent, ip, self.flags)

    def restore(self, values: Any) -> None:
        """Set all registers to the values in `values`, a result of snapshot()."""
        for name in self._names:
            setattr(self, name, getattr(values, name))
        self.flags = values.flags

    def close(self) -> None:
        """Detach these registers from the engine before the engine is freed.

        Later accesses raise AttributeError instead of reading freed memory.
        """
        del self._engine


class ApiRegs(Regs):
    """Registers that are accessed through Unicorn's API."""

    __slots__ = (*_SLOTS,)

    def __init__(self, engine: Engine, minus_one: int) -> None:
        self._engine = engine
        self.orig_ax = minus_one


class FastRegs(Regs):
    """Registers as ctypes fields in Unicorn's CPU structure, so that an access needs no call of Unicorn."""

    __slots__ = (*_NO_SLOTS,)
    _packed: ClassVar[struct.Struct]
    _values: ClassVar[Callable[[Any], tuple[int, ...]]]
    """Function: result of snapshot() -> values of the registers that this CPU has, without the flags."""
    _stored_flags: int
    """The flags that Unicorn doesn't compute lazily, such as the trap flag."""

    def step(self, on: bool) -> None:
        """Set the trap flag if `on` is True, otherwise clear it, without an API call.

        An API call would take too long, because step() is called twice for each stepped instruction.
        """
        stored = self._stored_flags
        flag = self._trap_flag
        self._stored_flags = stored | flag if on else stored & ~flag

    def address_of(self, name: str) -> int:
        """Return the address in this process of the register whose ctypes field is called `name`."""
        offset: int = getattr(type(self), name).offset
        return ctypes.addressof(self) + offset  # type: ignore[arg-type]

    def snapshot(self) -> Any:
        """Return the current values of all registers."""
        *general, ip = self._packed.unpack_from(self)  # type: ignore[arg-type]
        return self._register_set(*general, *self._absent, ip, self.flags)

    def restore(self, values: Any) -> None:
        """Set all registers to the values in `values`, a result of snapshot()."""
        self._packed.pack_into(self, 0, *type(self)._values(values))  # type: ignore[arg-type]
        self.flags = values.flags

    def close(self) -> None:
        """Detach these registers from the CPU structure, which is freed with the engine."""
        super().close()
        self.__class__ = ClosedRegs  # type: ignore[assignment]


class ClosedRegs(Regs, ctypes.Structure):
    """Class of a FastRegs object after close(), so that the object cannot access the freed CPU structure.

    It has the layout of FastRegs, but no attributes for registers.
    """

    __slots__ = (*_SLOTS,)


def api_regs(cpu: CpuModel, engine: Engine) -> Regs:
    """Return the registers of a CPU, accessed through Unicorn's API."""
    return _api_class(cpu)(engine, _minus_one(cpu))


def fast_regs(cpu: CpuModel, engine: Engine, address: int) -> Regs:
    """Return the registers of a CPU as an object that accesses Unicorn's CPU structure directly.

    `address`: result of find_cpu_state().
    """
    regs = _fast_class(cpu).from_address(address)
    regs._engine = engine
    regs.orig_ax = _minus_one(cpu)
    assert isinstance(regs, Regs)
    return regs


def _minus_one(cpu: CpuModel) -> int:
    return (1 << cpu.bits) - 1


def _common(cpu: CpuModel) -> dict[str, Any]:
    names = tuple(cpu.registers)
    absent = len(cpu.register_set()) - 1 - len(names)
    special = {name: _special_register(number) for name, number in cpu.special_registers.items()}
    aliases = {name: _alias(of) for name, of in cpu.aliases.items()}
    return {
        "__slots__": (),
        "_names": names,
        "_absent": (0,) * absent,
        "_register_set": staticmethod(cpu.register_set),
        "_flags_register": cpu.flags_register,
        "_flags_mask": _minus_one(cpu),
        "_fixed_flags": cpu.fixed_flags,
        "_trap_flag": cpu.trap_flag,
        **special,
        **aliases,
    }


@cache
def _api_class(cpu: CpuModel) -> type[ApiRegs]:
    mask = _minus_one(cpu)
    registers = {name: _api_register(number, mask) for name, number in cpu.registers.items()}
    return type("ApiRegs", (ApiRegs,), {**_common(cpu), **registers})


@cache
def _fast_class(cpu: CpuModel) -> Any:
    """Return a ctypes class with a field for each register, as Unicorn stores them: 8 bytes per register."""
    members = {
        **_common(cpu),
        "__slots__": _SLOTS,
        "_packed": struct.Struct(_state_format(cpu)),
        "_values": staticmethod(attrgetter(*cpu.registers)),
        "_fields_": tuple(_fields(cpu)),
    }
    return type("FastRegs", (FastRegs, ctypes.Structure), members)


def _fields(cpu: CpuModel) -> Iterator[tuple[str, Any]]:
    word = ctypes.c_uint64 if cpu.bits == 64 else ctypes.c_uint32
    rest = ctypes.c_uint8 * (STATE_SLOT - cpu.word_size)
    for slot, name in enumerate(cpu.registers):
        if name == "ip":
            yield "_others", ctypes.c_uint8 * (STATE_SLOT * (cpu.ip_slot - slot))
        yield name, word
        yield f"_above_{name}", rest
    if cpu.trap_flag:
        yield "_stored_flags", word


def _state_format(cpu: CpuModel) -> str:
    general = len(cpu.registers) - 1
    slot = "Q" if cpu.bits == 64 else "I4x"
    return f"<{slot * general}{STATE_SLOT * (cpu.ip_slot - general)}x{slot}"


def _api_register(register: int, mask: int) -> property:
    def get(self: ApiRegs) -> int:
        return self._engine.reg_read(register) & mask

    def put(self: ApiRegs, value: int) -> None:
        self._engine.reg_write(register, value & mask)

    return property(get, put)


def _special_register(register: int) -> property:
    return property(lambda self: self._engine.reg_read(register))


def _alias(name: str) -> property:
    return property(lambda self: getattr(self, name), lambda self, value: setattr(self, name, value))
