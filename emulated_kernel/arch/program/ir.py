"""Handler programs: what a probe does at a hit, for guest code to be made of it.

A program is a list of ops on a few virtual registers of the probed kernel's word size. An architecture's
code generator gives them real ones, saves what the probed code still needs, and restores it.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import dataclass_transform

from emulated_kernel.arch.program.asm_source import Assembly
from emulated_kernel.util.fast_dataclass import dataclass

NR_VREGS = 7
"""Virtual registers are numbered 0 to 6; each holds a word, undefined before it is first set.

Where a word has 4 bytes, ops on 8 take two of them: one more for the `high` half.
"""


class Condition(Enum):
    """Comparisons of words; the signed ones take both as two's complement."""

    EQ = auto()
    NE = auto()
    BELOW = auto()
    BELOW_EQ = auto()
    ABOVE = auto()
    ABOVE_EQ = auto()
    LESS = auto()
    LESS_EQ = auto()
    GREATER = auto()
    GREATER_EQ = auto()
    ANY_BIT = auto()
    """left & right != 0."""
    NO_BIT = auto()


class Arithmetic(Enum):
    """Two-operand arithmetic; results are cut to a word."""

    ADD = auto()
    SUB = auto()
    AND = auto()
    OR = auto()
    XOR = auto()
    SHL = auto()
    SHR = auto()
    SAR = auto()


@dataclass(frozen=True, slots=True)
class Label:
    """A place to go to; unique by identity of its number within a program."""

    number: int


@dataclass_transform(frozen_default=True)
class Op:
    """One op. Each kind of them is a frozen dataclass below this one, and a method of every Lowering."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


class SetImmediate(Op):
    """dst = value, cut to a word."""

    dst: int
    value: int


class Move(Op):
    """dst = src."""

    dst: int
    src: int


class GetRegister(Op):
    """dst = a register of the probed code as it was at the hit; pt_regs name, `sp` and `flags` too."""

    dst: int
    name: str


class SetRegister(Op):
    """A register of the probed code = src: where there is a link register, that one alone."""

    name: str
    src: int


class Load(Op):
    """dst = `size` bytes at base + offset, extended by zeros or by the sign.

    `on_fault`: where to go when memory faults; without it the access can't fault.
    """

    dst: int
    base: int
    offset: int
    size: int
    is_signed: bool = False
    on_fault: Label | None = None


class Store(Op):
    """The low `size` bytes of src at base + offset; can't fault."""

    base: int
    offset: int
    src: int
    size: int


class StoreImmediate(Op):
    """The low `size` bytes of a number at base + offset; can't fault. 8 bytes are stored on 32 bits too."""

    base: int
    offset: int
    value: int
    size: int


class LoadAbsolute(Op):
    """dst = `size` bytes at an absolute address, extended by zeros."""

    dst: int
    address: int
    size: int


class AddToAbsolute(Op):
    """Add a small number to the 8 bytes at an absolute address; no other CPU's addition gets lost."""

    address: int
    value: int


class LoadPerCpu(Op):
    """dst = `size` bytes of the CPU's own data, at an offset from its base, extended by zeros."""

    dst: int
    offset: int
    size: int


class StorePerCpu(Op):
    """The low `size` bytes of src into the CPU's own data."""

    offset: int
    src: int
    size: int


class AddToPerCpu(Op):
    """Add a small number to `size` bytes of the CPU's own data; 8 bytes on 32 bits too."""

    offset: int
    value: int
    size: int = 8


class IncreasePerCpu(Op):
    """Add a word, unsigned, to 8 bytes of the CPU's own data."""

    offset: int
    src: int


class ComputePerCpu(Op):
    """dst = dst op a word of the CPU's own data, op being ADD or SUB; with `high` two words op 8 bytes."""

    op: Arithmetic
    dst: int
    offset: int
    high: int | None = None


class AddAndFetch(Op):
    """Add a small number to the 8 bytes at an absolute address, and have the sum in dst and `high`.

    No other CPU's access comes in between.
    """

    dst: int
    address: int
    value: int
    high: int | None = None


class Compute(Op):
    """dst = dst op src; a shift's count is below the word's bits."""

    op: Arithmetic
    dst: int
    src: int


class ComputeImmediate(Op):
    """dst = dst op value; value fits 32 bits signed, shift counts are below the word's bits."""

    op: Arithmetic
    dst: int
    value: int


class Multiply(Op):
    """dst = the low word of dst * src."""

    dst: int
    src: int


class CompareExchange(Op):
    """If the word at base + offset is `expected`, it becomes `new`, at once for all CPUs; can't fault.

    Else `expected` is set to that word, and the program goes on at the label.
    """

    base: int
    offset: int
    expected: int
    new: int
    label: Label


class FetchAdd(Op):
    """Add a register to the word at base + offset, at once for all CPUs; it becomes what was there."""

    base: int
    offset: int
    addend: int


class Place(Op):
    """Defines where a label stands."""

    label: Label


class Jump(Op):
    """Go to a label, forwards or backwards."""

    label: Label


class Branch(Op):
    """Go to a label if `left condition right` holds for two virtual registers."""

    condition: Condition
    left: int
    right: int
    label: Label


class BranchImmediate(Op):
    """Go to a label if `left condition value` holds; value fits 32 bits signed."""

    condition: Condition
    left: int
    value: int
    label: Label


class BranchPerCpu(Op):
    """Go to a label if `size` bytes of the CPU's own data compare so with the low `size` of a number.

    The value fits 32 bits signed; at most a word is compared.
    """

    condition: Condition
    offset: int
    size: int
    value: int
    label: Label


class CallHost(Op):
    """Let the host do something: a breakpoint, named by `number` to who made the program.

    The host may read and write memory. It says whether to go on behind the op, or at `label`.
    Virtual registers keep their values.
    """

    number: int
    label: Label


class RunAssembly(Op):
    """Run machine code on the registers of the probed code, as they were at the hit, or go to the label.

    It does that where it faults. Virtual registers are undefined behind it and at the label.
    """

    assembly: Assembly
    on_fault: Label


class JumpTo(Op):
    """Leave the program for code at an address, with the registers that the program was entered with.

    In a frame, it stays on the stack: code made for the frame goes on.
    """

    address: int


Program = tuple[Op, ...]
"""Ends by falling off its last op. What stands behind a Jump that nothing falls into is out of line."""


@dataclass(frozen=True, slots=True)
class HostCall:
    """Where a CallHost of generated code traps, and its label; offsets in bytes from the code's start."""

    number: int
    trap: int
    label: int


@dataclass(frozen=True, slots=True)
class Fixup:
    """An access that may fault, and where the CPU goes on then; offsets in bytes from the code's start."""

    access: int
    target: int


@dataclass(frozen=True, slots=True)
class HandlerCode:
    """Saving of registers, a program, and restoring; it can stand anywhere.

    Entered with the registers of the probed code; it falls off its end with them, as far as they are live.
    """

    code: bytes
    entry: int
    """Offset of the first instruction; what lies before is out of line."""
    host_calls: tuple[HostCall, ...]
    fixups: tuple[Fixup, ...]
