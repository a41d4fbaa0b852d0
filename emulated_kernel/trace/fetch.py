"""Running fetch programs: what a hit's arguments are, as the bytes of a trace entry."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from emulated_kernel.trace.fetchargs import ProbeArg
from emulated_kernel.trace.ports import ProbeHit, TraceArch
from emulated_kernel.trace.types import FetchOp, FetchProgram

COMMON_SIZE = 8
"""Bytes of common fields before an entry's payload; __data_loc counts from their start."""
MAX_STRING_SIZE = 4096
"""Bytes of a fetched string, its ending NUL included."""
_PAGE_SIZE = 4096
_USER_OPS = frozenset({FetchOp.UDEREF, FetchOp.ST_UMEM, FetchOp.ST_USTRING})

Value = int | bytes
"""A loaded value; bytes stand for the address of kernel memory with that content."""


@dataclass(frozen=True)
class FetchEnvironment:
    """What a program runs against, besides its ops."""

    arch: TraceArch
    hit: ProbeHit
    sprint_symbol: Callable[[int], str]
    field: Callable[[str], Value] | None = None
    """Of an event probe: what a field of the entry holds."""


def store(args: Sequence[ProbeArg], header: bytes, environment: FetchEnvironment) -> bytes:
    """An entry's payload: `header` (addresses), the arguments, and behind them the strings.

    Deviates: what can't be read is stored as 0, an unreadable string with length 0; Linux leaves what
    was in the buffer. Mirrors: kernel/trace/trace_probe_tmpl.h:store_trace_args (v6.1).
    """
    runs = [_ArgRun(arg, environment) for arg in args]
    fixed = sum(arg.size for arg in args)
    room = sum(run.reserve() for run in runs)
    entry = bytearray(len(header) + fixed + room)
    entry[: len(header)] = header
    area = _DynamicArea(entry, len(header) + fixed, room)
    for run in runs:
        run.store(entry, len(header), area)
    return bytes(entry)


def read_string(read: Callable[[int, int], bytes | None], address: int, limit: int) -> bytes | None:
    """The string at an address and its NUL, `limit` bytes at most; None where it can't be read.

    Reads up to page ends, so that a string that ends before an unmapped page is whole.
    """
    text = b""
    while len(text) < limit:
        chunk = min(_PAGE_SIZE - (address & _PAGE_SIZE - 1), limit - len(text))
        data = read(address, chunk)
        if data is None:
            return None
        head, end, _ = data.partition(b"\0")
        text += head
        if end:
            return text + end
        address += chunk
    return text[: limit - 1] + b"\0"


@dataclass
class _DynamicArea:
    """The strings' part of an entry: position of the next byte, and bytes left."""

    entry: bytearray
    position: int
    left: int

    def location(self, length: int) -> bytes:
        """A __data_loc of `length` bytes at the current position."""
        return struct.pack("<I", (length & 0xFFFF) << 16 | (self.position + COMMON_SIZE) & 0xFFFF)

    def put(self, data: bytes, used: int) -> None:
        self.entry[self.position : self.position + len(data)] = data
        self.position += used
        self.left -= used


class _ArgRun:
    """One argument of one hit."""

    def __init__(self, arg: ProbeArg, environment: FetchEnvironment) -> None:
        self._arg = arg
        self._environment = environment
        self._word = environment.arch.word_size
        self._mask = (1 << 8 * self._word) - 1
        self._stages = arg.stages
        self._strings: list[bytes | None] = []

    def reserve(self) -> int:
        """Fetch strings; returns the bytes that they need. Mirrors: __get_data_size (v6.1)."""
        if not self._arg.is_dynamic:
            return 0
        self._strings = [self._string(value) for value in self._string_values()]
        return sum(len(text) for text in self._strings if text is not None)

    def store(self, entry: bytearray, start: int, area: _DynamicArea) -> None:
        """Write the argument into `entry`, whose arguments begin at `start`."""
        at = start + self._arg.offset
        size = self._arg.type.size
        if self._arg.is_dynamic:
            for number, text in enumerate(self._strings):
                place = at + number * size
                entry[place : place + size] = self._store_string(text, area)
            return
        for number, data in enumerate(self._elements()):
            entry[at + number * size : at + (number + 1) * size] = data

    # Stage 1 and 2

    def _load(self) -> Value:
        insn = self._stages.load
        hit, arch = self._environment.hit, self._environment.arch
        match insn.op:
            case FetchOp.REG:
                return self._register(insn.name)
            case FetchOp.STACK:
                return self._stack_word(insn.value)
            case FetchOp.STACKP:
                return self._register(arch.stack_pointer)
            case FetchOp.RETVAL:
                return self._register(arch.return_register)
            case FetchOp.COMM:
                return hit.comm
            case FetchOp.ARG:
                return self._argument(insn.value)
            case FetchOp.DATA:
                return insn.data
            case FetchOp.TP_ARG if self._environment.field is not None:
                return self._environment.field(insn.name)
        return insn.value & self._mask

    def _register(self, name: str) -> int:
        value: int = getattr(self._environment.hit.regs, name)
        return value & self._mask

    def _argument(self, number: int) -> int:
        arch = self._environment.arch
        if number < len(arch.argument_registers):
            return self._register(arch.argument_registers[number])
        if not arch.stack_arguments:
            return 0
        return self._stack_word(number - len(arch.argument_registers) + 1)

    def _stack_word(self, number: int) -> int:
        """0 outside the kernel stack. Mirrors: regs_get_kernel_stack_nth (v6.1)."""
        arch = self._environment.arch
        top = self._register(arch.stack_pointer)
        address = top + number * self._word & self._mask
        if (address ^ top) & ~(arch.thread_size - 1) & self._mask:
            return 0
        return self._word_at(address, False) or 0

    def _word_at(self, address: int, user: bool) -> int | None:
        data = self._read(address, self._word, user)
        return None if data is None else int.from_bytes(data, "little")

    def _read(self, address: int, size: int, user: bool) -> bytes | None:
        address &= self._mask
        if user and address >= self._environment.arch.task_size:
            return None
        return self._environment.hit.read(address, size)

    def _follow(self, value: Value | None, derefs: FetchProgram) -> Value | None:
        for insn in derefs:
            if not isinstance(value, int):
                return None
            value = self._word_at(value + insn.value, insn.op in _USER_OPS)
        return value

    # Stage 3 to 5, of numbers

    def _elements(self) -> list[bytes]:
        stages = self._stages
        size = stages.store.size
        value = self._follow(self._load(), stages.derefs)
        # A string's address has no number here; Linux never lets one be stored as one.
        base = value if isinstance(value, int) else None
        count = stages.count or 1
        raw = [self._element(base, number * size) for number in range(count)]
        return [self._bitfield(data) for data in raw]

    def _element(self, base: int | None, shift: int) -> bytes:
        insn = self._stages.store
        if base is None:
            return bytes(insn.size)
        if insn.op is FetchOp.ST_RAW:
            return (base & (1 << 8 * insn.size) - 1).to_bytes(insn.size, "little")
        return self._read(base + insn.value + shift, insn.size, insn.op in _USER_OPS) or bytes(insn.size)

    def _bitfield(self, data: bytes) -> bytes:
        insn = self._stages.bitfield
        if insn is None:
            return data
        shifted = int.from_bytes(data, "little") << insn.lshift & (1 << 8 * insn.size) - 1
        return (shifted >> insn.rshift).to_bytes(insn.size, "little")

    # Stage 3 to 5, of strings

    def _string_values(self) -> list[Value | None]:
        """What each string's address is found from; of an array one after the other, by its last deref."""
        stages = self._stages
        if not stages.count:
            return [self._follow(self._load(), stages.derefs)]
        if not stages.derefs:
            return [None] * stages.count
        table = self._follow(self._load(), stages.derefs[:-1])
        if not isinstance(table, int):
            return [None] * stages.count
        last = stages.derefs[-1:]
        return [self._follow(table + number * self._word, last) for number in range(stages.count)]

    def _string(self, value: Value | None) -> bytes | None:
        """The string and its NUL; None where it can't be read."""
        insn = self._stages.store
        if value is None:
            return None
        if isinstance(value, bytes):
            return value.partition(b"\0")[0] + b"\0"
        address = value + insn.value & self._mask
        if insn.op is FetchOp.ST_SYMSTR:
            return self._environment.sprint_symbol(address).encode("utf-8", "surrogateescape") + b"\0"
        user = insn.op in _USER_OPS
        return read_string(lambda at, size: self._read(at, size, user), address, MAX_STRING_SIZE)

    def _store_string(self, text: bytes | None, area: _DynamicArea) -> bytes:
        """Write a string into `area`; returns its __data_loc.

        Linux: the place of a symbol's NUL is given to the next string, and the length counts all that is
        left; so `symstr` before another string prints both. Mirrors: fetch_store_symstring (v6.1).
        """
        if text is None:
            return area.location(0)
        is_symstr = self._stages.store.op is FetchOp.ST_SYMSTR
        location = area.location(area.left if is_symstr else len(text))
        area.put(text, len(text) - is_symstr)
        return location
