"""Types of fetch arguments, and the operations that an argument is compiled to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache

from emulated_kernel.errors import KernelError
from emulated_kernel.trace.numbers import kstrtoul


class FetchOp(Enum):
    """One step of a fetch program. Mirrors: kernel/trace/trace_probe.h FETCH_OP_* (v6.1)."""

    # Stage 1: load a value. SYMBOL only names what the IMM after it is resolved from.
    REG = auto()
    """Register `name`."""
    STACK = auto()
    """Word number `value` from the stack pointer on."""
    STACKP = auto()
    """The stack pointer."""
    RETVAL = auto()
    """The function's result."""
    IMM = auto()
    """The number `value`."""
    COMM = auto()
    """The address of the current task's name."""
    ARG = auto()
    """Argument number `value`, from 0, of a function at its entry."""
    DATA = auto()
    """The address of the bytes `data`."""
    TP_ARG = auto()
    """The field `name` of the entry that an event probe looks at."""
    FOFFS = auto()
    """Where the byte `value` of the probed file is mapped."""
    SYMBOL = auto()
    """Nothing is done; the next op is IMM of symbol expression `name`."""
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
    # Stage 5: do stages 2 to 4 for `value` array elements in all.
    LP_ARRAY = auto()


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
class FetchType:
    """How an argument is stored, described in `format`, and printed."""

    name: str
    size: int
    """Bytes of one element in the fixed part of an entry; of a string its __data_loc."""
    is_signed: bool
    is_string: bool
    print_fmt: str
    """As in `print fmt:`."""
    field_type: str
    """As in `field:`."""
    render: Callable[[int], str]
    """An element's text, from its value; not used for strings and symbols."""

    def value(self, data: bytes, offset: int) -> int:
        """The element at `offset`."""
        return int.from_bytes(data[offset : offset + self.size], "little", signed=self.is_signed)


def _basic(prefix: str, bits: int) -> FetchType:
    wide = "L" if bits == 64 else ""
    conversion = {"u": f"%{wide}u", "s": f"%{wide}d", "x": f"0x%{wide}x"}[prefix]
    return FetchType(
        name=f"{prefix}{bits}",
        size=bits // 8,
        is_signed=prefix == "s",
        is_string=False,
        print_fmt=conversion,
        field_type=f"{'s' if prefix == 's' else 'u'}{bits}",
        render=hex if prefix == "x" else str,
    )


def _string(name: str) -> FetchType:
    return FetchType(name, 4, True, True, '\\"%s\\"', "__data_loc char[]", str)


def _symbol(word_size: int) -> FetchType:
    return FetchType("symbol", word_size, False, False, "%pS", f"u{8 * word_size}", hex)


@cache
def fetch_types(word_size: int) -> dict[str, FetchType]:
    """All types by name. Mirrors: kernel/trace/trace_probe.c:probe_fetch_types (v6.1)."""
    types = [_string(name) for name in ("string", "ustring", "symstr")]
    types += [_basic(prefix, bits) for prefix in "usx" for bits in (8, 16, 32, 64)]
    types.append(_symbol(word_size))
    return {each.name: each for each in types}


def find_fetch_type(name: str | None, word_size: int) -> FetchType | None:
    """The type of that name, the default one for None; `bN@O/SIZE` is stored as uSIZE.

    Mirrors: kernel/trace/trace_probe.c:find_fetch_type (v6.1).
    """
    if name is None:
        name = f"x{8 * word_size}"
    elif name.startswith("b"):
        name = _container_of_bitfield(name)
    return fetch_types(word_size).get(name)


def _container_of_bitfield(name: str) -> str:
    try:
        bits = kstrtoul(name.partition("/")[2])
    except KernelError:
        return ""
    return f"u{bits}"


_DEREFS = frozenset({FetchOp.DEREF, FetchOp.UDEREF})


@dataclass(frozen=True)
class FetchStages:
    """A program by stages. Mirrors: the stages of kernel/trace/trace_probe.h:enum fetch_op (v6.1)."""

    load: FetchInsn
    derefs: FetchProgram
    store: FetchInsn
    bitfield: FetchInsn | None
    count: int


def stages_of(program: FetchProgram) -> FetchStages:
    """Take a program apart, once: it is run at every hit."""
    ops = list(program)
    count = ops.pop().value if ops[-1].op is FetchOp.LP_ARRAY else 0
    bitfield = ops.pop() if ops[-1].op is FetchOp.MOD_BF else None
    store = ops.pop()
    derefs = tuple(insn for insn in ops if insn.op in _DEREFS)
    load = ops[len(ops) - len(derefs) - 1]
    return FetchStages(load, derefs, store, bitfield, count)
