"""Register liveness on x86: the registers and flags that a function may still read.

A probe must save these registers. The analysis is a backward data flow over the function's instructions. All
registers are live where control leaves the function: at a return, call, trap, indirect jump or fixup. The
reason is that kernel assembly follows no reliable calling convention. A register reported dead is therefore
overwritten on every path before it can be read.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

from emulated_kernel.arch.analysis.dataflow import LEAVES, Control, Effect, solve
from emulated_kernel.arch.analysis.detour_region import LiveRegisters
from emulated_kernel.arch.analysis.function import Function
from emulated_kernel.arch.x86.emulate import REGISTER_NAMES
from emulated_kernel.arch.x86.insn import decode_all

_FLAGS_SHIFT = len(REGISTER_NAMES)
_STATUS_FLAGS = 0b111111
"""Mask of OF, SF, ZF, AF, CF and PF in iced's numbering."""
_ALL = _STATUS_FLAGS << _FLAGS_SHIFT | (1 << _FLAGS_SHIFT) - 1
_STACK_POINTER = 1 << REGISTER_NAMES.index("sp")
"""Mask of sp, which is never dead, because an interrupt can push at any time."""

ALL_LIVE = LiveRegisters(frozenset(REGISTER_NAMES), flags=True)
"""All registers and the flags: the live registers at addresses about which nothing is known."""


class Liveness:
    """Live registers before each instruction of a function.

    A register stays live if it is written partially, conditionally, or by a shift whose count may be 0.
    """

    def __init__(self, function: Function, bits: int = 64) -> None:
        effects = _effects(function, bits)
        self._live = solve(effects, _ALL)

    def at(self, addr: int) -> LiveRegisters:
        """Return the live registers and flags before the instruction at `addr`.

        All registers and flags are live if no instruction is known at this address.
        """
        return _as_names(self._live.get(addr, _ALL) | _STACK_POINTER)


@lru_cache(4096)
def _as_names(live: int) -> LiveRegisters:
    """Convert a mask of registers and flags to LiveRegisters.

    Equal masks share one object, because compiled code is looked up by this object.
    """
    names = (name for number, name in enumerate(REGISTER_NAMES) if live >> number & 1)
    return LiveRegisters(frozenset(names), bool(live >> _FLAGS_SHIFT))


def _effects(function: Function, bits: int) -> dict[int, Effect]:
    from iced_x86 import InstructionInfoFactory

    factory = InstructionInfoFactory()
    effects = {}
    for addr, _, insn in decode_all(function.code[: function.size], function.addr, bits):
        if insn is None or addr in function.exception_entries:
            effects[addr] = Effect(_ALL, 0, LEAVES)
            continue
        reads, kills = _registers(factory.info(insn))
        flags_read, flags_killed = _flags(insn)
        reads |= flags_read << _FLAGS_SHIFT
        kills |= flags_killed << _FLAGS_SHIFT
        if insn.has_rep_prefix or insn.has_repne_prefix:
            kills = 0  # With count 0, a repeated instruction does nothing.
        effects[addr] = Effect(reads, ~kills, _control(insn, addr))
    return effects


def _control(insn: Any, addr: int) -> Control | None:
    from iced_x86 import FlowControl, Mnemonic

    flow = insn.flow_control
    if insn.mnemonic == Mnemonic.HLT:
        # hlt is a hypercall: the host reads registers and returns a value in one.
        return LEAVES
    if flow == FlowControl.NEXT:
        return None
    if flow == FlowControl.CONDITIONAL_BRANCH:
        return Control(falls_through=True, targets=(insn.near_branch_target - addr,))
    if flow == FlowControl.UNCONDITIONAL_BRANCH and insn.near_branch_target:
        return Control(falls_through=False, targets=(insn.near_branch_target - addr,))
    return LEAVES


def _registers(info: Any) -> tuple[int, int]:
    """Return two masks of general registers: those that an instruction reads, and those that it overwrites.

    A register that the instruction overwrites only in part is not in the second mask.
    """
    from iced_x86 import OpAccess, RegisterExt

    reading = (OpAccess.READ, OpAccess.COND_READ, OpAccess.READ_WRITE, OpAccess.READ_COND_WRITE)
    writing = (OpAccess.WRITE, OpAccess.READ_WRITE)
    reads = 0
    kills = 0
    for used in info.used_registers():
        number = register_numbers().get(RegisterExt.full_register(used.register))
        if number is None:
            continue
        if used.access in reading:
            reads |= 1 << number
        # A 32-bit write clears the upper half; narrower writes preserve the rest of the register.
        if used.access in writing and RegisterExt.size(used.register) >= 4:
            kills |= 1 << number
    return reads, kills


def _flags(insn: Any) -> tuple[int, int]:
    """Return two masks of status flags: those that an instruction reads, and those that it overwrites.

    AF counts as overwritten if it becomes undefined, as by logic instructions. Shifts and rotates count as
    overwriting no flag, because with count 0 they preserve every flag.
    """
    from iced_x86 import RflagsBits

    overwritten = insn.rflags_written | insn.rflags_cleared | insn.rflags_set
    overwritten |= insn.rflags_undefined & RflagsBits.AF
    if insn.mnemonic in _shifts():
        overwritten = 0
    return insn.rflags_read & _STATUS_FLAGS, overwritten & _STATUS_FLAGS


@cache
def register_numbers() -> dict[int, int]:
    """Return a map: iced's number of a 64-bit register -> the register's number in ModRM."""
    from iced_x86 import Register

    names = ["RAX", "RCX", "RDX", "RBX", "RSP", "RBP", "RSI", "RDI", *(f"R{n}" for n in range(8, 16))]
    return {getattr(Register, name): number for number, name in enumerate(names)}


@cache
def _shifts() -> frozenset[int]:
    from iced_x86 import Mnemonic

    names = ("ROL", "ROR", "RCL", "RCR", "SHL", "SHR", "SAL", "SAR", "SHLD", "SHRD")
    return frozenset(getattr(Mnemonic, name) for name in names)
