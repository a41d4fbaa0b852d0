"""Fetch instructions: the operations to which a fetch argument is compiled, in the stages that a hit runs."""

from __future__ import annotations

from enum import Enum, auto

from emulated_kernel.util.fast_dataclass import dataclass


class FetchOp(Enum):
    """An operation of a fetch program. `name`, `value` and `data` below are its operands; see FetchInsn.

    Mirrors: kernel/trace/trace_probe.h FETCH_OP_* (v6.1).
    """

    # Stage 1: load a value.
    REG = auto()
    """Load register `name`."""
    STACK = auto()
    """Load word `value` of the stack; word 0 is at the stack pointer."""
    STACKP = auto()
    """Load the stack pointer, which is register `name`."""
    RETVAL = auto()
    """Load the function's return value, which is in register `name`."""
    IMM = auto()
    """Load the number `value`."""
    COMM = auto()
    """Load the address of the current task's name."""
    ARG = auto()
    """Load 0, for a function argument that is not in a register, on machines with a link register.

    Linux: the argument is not read from the stack on those machines.
    """
    DATA = auto()
    """Load the address of the constant bytes `data`."""
    EDATA = auto()
    """Load word `value` of the data that was stored at the entry of a returning function."""
    TP_ARG = auto()
    """Load the field `name` of the entry that an event probe receives."""
    FOFFS = auto()
    """Load the address at which the byte at offset `value` of the probed file is mapped."""
    CURRENT = auto()
    """Load the address of the current task's task_struct."""
    SYMBOL = auto()
    """Placeholder for the symbol expression `name`. resolve_symbol() replaces the placeholder by an IMM.

    Linux: a symbol's placeholder precedes an IMM, and both count as operations.
    """
    # Stage 2: replace the value by the word at the address value + `value`.
    DEREF = auto()
    UDEREF = auto()
    """Replace the loaded address by the word of user memory at this address plus `value`."""
    CPU_PTR = auto()
    """Replace the address of a per-CPU variable by the address of the current CPU's instance."""
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
    """An operation of a fetch program with its operands. FetchOp says which operands an operation uses.

    Offsets and sizes are in bytes.
    """

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
    """A fetch program, divided into the stages that a hit runs one after the other.

    Mirrors: the stages of kernel/trace/trace_probe.h:enum fetch_op (v6.1).
    """

    load: FetchInsn
    derefs: FetchProgram
    pointer: FetchInsn | None
    """For an array of strings, the dereference that reads the address of each string; otherwise None."""
    store: FetchInsn
    bitfield: FetchInsn | None
    count: int
    """Number of array elements, or 0 if the argument is not an array."""
