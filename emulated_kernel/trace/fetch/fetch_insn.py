"""The operations that a fetch argument is compiled to, in the stages that a hit runs them in."""

from __future__ import annotations

from enum import Enum, auto

from emulated_kernel.util.fast_dataclass import dataclass


class FetchOp(Enum):
    """One step of a fetch program. Mirrors: kernel/trace/trace_probe.h FETCH_OP_* (v6.1)."""

    # Stage 1: load a value.
    REG = auto()
    """Register `name`."""
    STACK = auto()
    """Word number `value` from the stack pointer on."""
    STACKP = auto()
    """The stack pointer, which is register `name`."""
    RETVAL = auto()
    """The function's result, which is in register `name`."""
    IMM = auto()
    """The number `value`."""
    COMM = auto()
    """The address of the current task's name."""
    ARG = auto()
    """0: an argument that is in no register, where Linux looks for none on the stack."""
    DATA = auto()
    """The address of the bytes `data`."""
    TP_ARG = auto()
    """The field `name` of the entry that an event probe looks at."""
    FOFFS = auto()
    """Where the byte `value` of the probed file is mapped."""
    SYMBOL = auto()
    """An IMM takes its place once symbol expression `name` is resolved. Linux: it stands in front of that."""
    # Stage 2: replace the value by the word at value + `value`.
    DEREF = auto()
    UDEREF = auto()
    """As DEREF, of user memory."""
    # Stage 3: store, the `size` bytes of the value itself or what it points to (+ `value`).
    ST_RAW = auto()
    ST_MEM = auto()
    ST_UMEM = auto()
    ST_STRING = auto()
    ST_USTRING = auto()
    ST_SYMSTR = auto()
    # Stage 4: shift the stored `size` bytes left by `lshift`, right by `rshift`.
    MOD_BF = auto()


@dataclass(frozen=True, slots=True)
class FetchInsn:
    """An operation and its operands, as FetchOp says; offsets and sizes in bytes."""

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
    """What a hit runs. Mirrors: the stages of kernel/trace/trace_probe.h:enum fetch_op (v6.1)."""

    load: FetchInsn
    derefs: FetchProgram
    pointer: FetchInsn | None
    """Of an array of strings the last deref: at its place is a table of their addresses."""
    store: FetchInsn
    bitfield: FetchInsn | None
    count: int
    """Stages 2 to 4 are done for so many array elements; 0 where it is no array."""
