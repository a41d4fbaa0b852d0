"""The live registers of the stopped (or trapped) CPU, under Linux's pt_regs names."""

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

# Not literals where they are used: mypy takes registers, which are no slots, for missing ones.
_NO_SLOTS: tuple[str, ...] = ()
_SLOTS = ("_engine", "orig_ax")
STATE_SLOT = 8
"""Bytes that a register has in the emulator's own CPU state, however wide it is."""


class Regs:
    """Registers as attributes; reading and writing them reads and writes the CPU.

    Values are unsigned and as wide as the CPU's; what is assigned is cut to that. Only valid while the guest
    is stopped or inside a hook. i386 has no r8 to r15. `api_regs` works with any library; `fast_regs` costs a
    tenth of it.
    """

    __slots__ = (*_NO_SLOTS,)

    _names: ClassVar[tuple[str, ...]]
    _absent: ClassVar[tuple[int, ...]]
    """Zeros for the members of a register set that the CPU doesn't have."""
    _register_set: ClassVar[Callable[..., Any]]
    _flags_register: ClassVar[int]
    _flags_mask: ClassVar[int]
    _fixed_flags: ClassVar[int]
    _trap_flag: ClassVar[int]

    _engine: Engine
    orig_ax: int
    """-1 unless a system call is entered; no hardware register. riscv64: orig_a0."""
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
    """Segment selectors; fs is that of i386's per-CPU data, gs that of its user space's thread data."""
    ss: int
    ds: int
    es: int
    fs: int
    gs: int

    @property
    def flags(self) -> int:
        """EFLAGS, exact: it is computed lazily, so that only the library knows it. riscv64: sstatus."""
        return self._engine.reg_read(self._flags_register)

    @flags.setter
    def flags(self, value: int) -> None:
        self._engine.reg_write(self._flags_register, value & self._flags_mask | self._fixed_flags)

    def step(self, on: bool) -> None:
        """Set the trap flag, or clear it; of a CPU that has one."""
        flags = self.flags
        self.flags = flags | self._trap_flag if on else flags & ~self._trap_flag

    def get(self, name: str) -> int:
        """A register by name. Raises: AttributeError (no such register)."""
        return int(getattr(self, name))

    def set(self, name: str, value: int) -> None:
        """Set a register by name. Raises: AttributeError (no such register, or one that can only be read)."""
        setattr(self, name, value)

    def snapshot(self) -> Any:
        """All values now, as the CPU's register set."""
        *general, ip = [getattr(self, name) for name in self._names]
        return self._register_set(*general, *self._absent, ip, self.flags)

    def restore(self, values: Any) -> None:
        """Set all registers."""
        for name in self._names:
            setattr(self, name, getattr(values, name))
        self.flags = values.flags

    def close(self) -> None:
        """Called before the engine goes; using the registers afterwards is an AttributeError, not a crash."""
        del self._engine


class ApiRegs(Regs):
    """Registers through the library's API."""

    __slots__ = (*_SLOTS,)

    def __init__(self, engine: Engine, minus_one: int) -> None:
        self._engine = engine
        self.orig_ax = minus_one


class FastRegs(Regs):
    """Registers as fields laid over the emulator's own CPU state: no call at all."""

    __slots__ = (*_NO_SLOTS,)
    _packed: ClassVar[struct.Struct]
    _values: ClassVar[Callable[[Any], tuple[int, ...]]]
    """The members of a register set that the CPU has."""
    _stored_flags: int
    """All that aren't computed: the trap flag among them."""

    def step(self, on: bool) -> None:
        """See Regs: no call, since it is done twice for each instruction that is stepped."""
        stored = self._stored_flags
        flag = self._trap_flag
        self._stored_flags = stored | flag if on else stored & ~flag

    def snapshot(self) -> Any:
        """All values now."""
        *general, ip = self._packed.unpack_from(self)  # type: ignore[arg-type]
        return self._register_set(*general, *self._absent, ip, self.flags)

    def restore(self, values: Any) -> None:
        """Set all registers."""
        self._packed.pack_into(self, 0, *type(self)._values(values))  # type: ignore[arg-type]
        self.flags = values.flags

    def close(self) -> None:
        """The CPU state is freed with the engine: nothing may look there any more."""
        super().close()
        self.__class__ = ClosedRegs  # type: ignore[assignment]


class ClosedRegs(Regs, ctypes.Structure):
    """What FastRegs turn into: laid out alike, but there are no registers any more."""

    __slots__ = (*_SLOTS,)


def api_regs(cpu: CpuModel, engine: Engine) -> Regs:
    """The registers of a CPU by the library's API."""
    return _api_class(cpu)(engine, _minus_one(cpu))


def fast_regs(cpu: CpuModel, engine: Engine, address: int) -> Regs:
    """The registers of a CPU over its state at `address`, found by `quirks.find_cpu_state`."""
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
    """Each register has 8 bytes of the emulator's state, of which a narrow CPU uses the lower ones."""
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
