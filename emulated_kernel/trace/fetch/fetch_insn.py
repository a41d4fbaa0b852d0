"""Fetch instructions: the operations that a fetch argument is compiled to, in the stages of a hit."""

from __future__ import annotations

from enum import Enum, auto

from emulated_kernel.util.fast_dataclass import dataclass


class FetchOp(Enum):
    """An operation of a fetch program. Mirrors: kernel/trace/trace_probe.h FETCH_OP_* (v6.1)."""

    # Stage 1: load a value.
    REG = auto()
    """Register `name`."""
    STACK = auto()
    """The word with number `value`, counted from the stack pointer."""
    STACKP = auto()
    """The stack pointer, which is register `name`."""
    RETVAL = auto()
    """The function's return value, which is in register `name`."""
    IMM = auto()
    """The number `value`."""
    COMM = auto()
    """The address of the current task's name."""
    ARG = auto()
    """The constant 0, for an argument that is in no register.

    Linux does not look for it on the stack either.
    """
    DATA = auto()
    """The address of the constant bytes `data`."""
    TP_ARG = auto()
    """The field `name` of the entry of the event that an event probe is attached to."""
    FOFFS = auto()
    """The address at which the byte `value` of the probed file is mapped."""
    SYMBOL = auto()
    """Placeholder for the symbol expression `name`. Resolving the symbol replaces it by an IMM.

    Linux: a symbol's placeholder precedes an IMM, and both count as operations.
    """
    # Stage 2: replace the value by the word at the address value + `value`.
    DEREF = auto()
    UDEREF = auto()
    """DEREF of user memory."""
    # Stage 3: store `size` bytes, either of the value itself or of the memory at value + `value`.
    ST_RAW = auto()
    ST_MEM = auto()
    ST_UMEM = auto()
    ST_STRING = auto()
    ST_USTRING = auto()
    ST_SYMSTR = auto()
    # Stage 4: shift the stored `size` bytes left by `lshift`, then right by `rshift`.
    MOD_BF = auto()


@dataclass(frozen=True, slots=True)
class FetchInsn:
    """An operation and its operands, whose meaning FetchOp defines. Offsets and sizes are in bytes."""

    op: FetchOp
    name: str = ""
    value: int = 0
    size: int = 0
    data: bytes = b""
    lshift: int = 0
    rshift: int = 0


FetchProgram = tuple[FetchInsn, ...]


@dataclass(frozen=True)
class FetchStages:
    """A fetch program in the form that a hit runs.

    Mirrors: the stages of kernel/trace/trace_probe.h:enum fetch_op (v6.1).
    """

    load: FetchInsn
    derefs: FetchProgram
    pointer: FetchInsn | None
    """The last dereference of an array of strings, which reads the strings' addresses from a table."""
    store: FetchInsn
    bitfield: FetchInsn | None
    count: int
    """Number of array elements, for each of which stages 2 to 4 run.

    It is 0 if the argument is not an array.
    """
