"""Which registers and flags a probe must save: those that the function may still read.

Backward data flow over the function's instructions. All is taken as live wherever the function is left
(return, call, trap, indirect jump, fixup): kernel assembly follows no calling convention that could be
relied on. So what is reported dead is overwritten on every path before it can be seen.
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
"""OF SF ZF AF CF PF, as iced numbers them."""
_ALL = _STATUS_FLAGS << _FLAGS_SHIFT | (1 << _FLAGS_SHIFT) - 1
_STACK_POINTER = 1 << REGISTER_NAMES.index("sp")
"""Never dead: an interrupt pushes wherever it comes."""

ALL_LIVE = LiveRegisters(frozenset(REGISTER_NAMES), flags=True)
"""Where nothing is known, of either width."""


class Liveness:
    """Liveness in one function, computed once.

    A register that is written in part, under a condition, or by a shift whose count may be 0 isn't dead.
    """

    def __init__(self, function: Function, bits: int = 64) -> None:
        effects = _effects(function, bits)
        self._live = solve(effects, _ALL)

    def at(self, addr: int) -> LiveRegisters:
        """What is live in front of the instruction at `addr`; everything where there is none."""
        return _as_names(self._live.get(addr, _ALL) | _STACK_POINTER)


@lru_cache(4096)
def _as_names(live: int) -> LiveRegisters:
    """One object for equal states: there are few, and what is compiled is looked up by them."""
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
            kills = 0  # With count 0 a repeated instruction does nothing.
        effects[addr] = Effect(reads, ~kills, _control(insn, addr))
    return effects


def _control(insn: Any, addr: int) -> Control | None:
    from iced_x86 import FlowControl, Mnemonic

    flow = insn.flow_control
    if insn.mnemonic == Mnemonic.HLT:
        # The host reads registers there, and answers in one.
        return LEAVES
    if flow == FlowControl.NEXT:
        return None
    if flow == FlowControl.CONDITIONAL_BRANCH:
        return Control(falls_through=True, targets=(insn.near_branch_target - addr,))
    if flow == FlowControl.UNCONDITIONAL_BRANCH and insn.near_branch_target:
        return Control(falls_through=False, targets=(insn.near_branch_target - addr,))
    return LEAVES


def _registers(info: Any) -> tuple[int, int]:
    """Masks of the general registers that are read, and of those overwritten as a whole."""
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
        # A 32-bit write clears the upper half; narrower ones leave the rest of the register.
        if used.access in writing and RegisterExt.size(used.register) >= 4:
            kills |= 1 << number
    return reads, kills


def _flags(insn: Any) -> tuple[int, int]:
    """Masks of the status flags that are read, and of those overwritten.

    AF counts as overwritten where it becomes undefined: logic instructions leave nothing else to it.
    Shifts and rotates don't count: with count 0 they leave every flag.
    """
    from iced_x86 import RflagsBits

    overwritten = insn.rflags_written | insn.rflags_cleared | insn.rflags_set
    overwritten |= insn.rflags_undefined & RflagsBits.AF
    if insn.mnemonic in _shifts():
        overwritten = 0
    return insn.rflags_read & _STATUS_FLAGS, overwritten & _STATUS_FLAGS


@cache
def register_numbers() -> dict[int, int]:
    """iced's 64-bit register to its number in ModRM."""
    from iced_x86 import Register

    names = ["RAX", "RCX", "RDX", "RBX", "RSP", "RBP", "RSI", "RDI", *(f"R{n}" for n in range(8, 16))]
    return {getattr(Register, name): number for number, name in enumerate(names)}


@cache
def _shifts() -> frozenset[int]:
    from iced_x86 import Mnemonic

    names = ("ROL", "ROR", "RCL", "RCR", "SHL", "SHR", "SAL", "SAR", "SHLD", "SHRD")
    return frozenset(getattr(Mnemonic, name) for name in names)
