"""Types of fetch arguments: their allowed sources, their fields in a record, fetching and printing.

A new kind of type needs a class here. If guest code fetches it, it also needs an entry in _EMITTERS of
compiled/fetch.py.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import ClassVar

from emulated_kernel.trace.fetch.fetch_insn import FetchInsn, FetchOp, FetchProgram, FetchStages
from emulated_kernel.trace.fetch.memory import EntryAddress, FetchEnvironment, Value, read_string
from emulated_kernel.trace.interface import Interface, InterfaceRule
from emulated_kernel.trace.ring.trace_entry import COMMON_SIZE
from emulated_kernel.trace.symbols import KernelSymbols, sprint_symbol
from emulated_kernel.trace.text.chars import bytes_to_text
from emulated_kernel.trace.text.numbers import kstrtoul, simple_strtoul
from emulated_kernel.trace.text.probe_errors import ProbeError
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass, replace

MAX_STRING_SIZE = 4096
"""Maximum size of a fetched string in bytes, including its NUL."""
_DATA_LOC = struct.Struct("<HH")
"""Format of a string's __data_loc: offset of the string in the entry, and its size in bytes."""
_ADDRESS_SOURCES = frozenset({FetchOp.IMM, FetchOp.COMM, FetchOp.DATA, FetchOp.TP_ARG})
_STRING_SOURCES = _ADDRESS_SOURCES | {FetchOp.DEREF, FetchOp.UDEREF}
_SYMSTR_SOURCES = frozenset(
    {FetchOp.REG, FetchOp.STACK, FetchOp.RETVAL, FetchOp.ARG, FetchOp.DEREF, FetchOp.TP_ARG}
)
_NUMBER_STORES = {FetchOp.DEREF: FetchOp.ST_MEM, FetchOp.UDEREF: FetchOp.ST_UMEM}

Elements = Sequence[bytes | None]
"""Elements of a fetched argument: numbers as bytes, strings with their NULs, or None if unreadable."""


class StringArea:
    """The part of an entry that holds its strings. It follows the fixed part."""

    def __init__(self, position: int, room: int) -> None:
        """Create an empty area of `room` bytes that begins at byte `position` of the entry."""
        self.data = bytearray(room)
        self._position = position
        self._used = 0

    def add(self, text: bytes | None, *, overlaps: bool = False) -> bytes:
        """Append a fetched string and return its __data_loc, which has length 0 if `text` is None.

        If `overlaps` is set, the length in __data_loc covers all remaining bytes of the area, and the next
        string overwrites the NUL of this one, as in Linux for symstr. Otherwise the string keeps its NUL, and
        its own size is the length.
        """
        used = self._used
        room = len(self.data)
        at = self._position + used & 0xFFFF
        if text is None:
            return _DATA_LOC.pack(at, 0)
        self.data[used : used + len(text)] = text
        self._used += len(text) - overlaps
        return _DATA_LOC.pack(at, (room - used if overlaps else len(text)) & 0xFFFF)


@dataclass(frozen=True)
class FetchType(ABC):
    """A type of a fetch argument. Mirrors: kernel/trace/trace_probe.h:struct fetch_type (v6.1)."""

    name: str
    size: int
    """Size of an element in the fixed part of an entry, in bytes; for a string, the size of __data_loc."""
    is_signed: bool
    print_fmt: str
    """The conversion specification of an element in the event's print format, such as `%u`."""
    field_type: str
    """The C type of an element in `field:` lines of the format file."""
    is_dynamic: ClassVar[bool]
    """Whether elements are strings, which are stored after the fixed part and located by a __data_loc."""

    @abstractmethod
    def source_error(self, source: FetchOp) -> ProbeError | None:
        """Return None if a value that the operation `source` loads can have this type, else the error."""

    @abstractmethod
    def with_store(self, code: FetchProgram, *, is_array: bool) -> FetchProgram:
        """Return the fetch program `code` with the store operation of this type at its end.

        The store operation may replace a dereference at the end of `code`. `is_array`: whether the argument
        is an array.
        Mirrors: kernel/trace/trace_probe.c:traceprobe_parse_probe_arg_body (v6.1).
        """

    @abstractmethod
    def fetch(self, stages: FetchStages, environment: FetchEnvironment) -> Elements:
        """Run the fetch program `stages` at the hit of `environment`, and return the argument's elements."""

    @abstractmethod
    def fixed_part(self, elements: Elements, area: StringArea) -> bytes:
        """Return the bytes of the elements in the fixed part of an entry, and add their strings to `area`."""

    @abstractmethod
    def text(self, payload: bytes, at: int, symbols: KernelSymbols) -> str:
        """Return the text that `trace` shows for the element at byte `at` of an entry's payload."""

    def print_value(self, element: str) -> str:
        """Return the C expression that prints the field `element` in the event's print format."""
        return f"__get_str({element})" if self.is_dynamic else f"REC->{element}"


class Number(FetchType):
    """A number of 1, 2, 4 or 8 bytes, shown in decimal."""

    is_dynamic = False

    def source_error(self, source: FetchOp) -> ProbeError | None:
        del source
        return None

    def with_store(self, code: FetchProgram, *, is_array: bool) -> FetchProgram:
        del is_array
        last = code[-1]
        if op := _NUMBER_STORES.get(last.op):
            return (*code[:-1], replace(last, op=op, size=self.size))
        return (*code, FetchInsn(FetchOp.ST_RAW, size=self.size))

    def fetch(self, stages: FetchStages, environment: FetchEnvironment) -> Elements:
        """Run a fetch program at a hit, and return the number, or all numbers of an array.

        Deviates: 0 is stored for unreadable memory; Linux leaves the former contents of the buffer.
        Deviates: 0 is stored for the address of a string that is not in guest memory; Linux stores the
        address.
        """
        value: Value | None = environment.load(stages.load)
        if stages.derefs:
            value = environment.follow(value, stages.derefs)
        insn = stages.store
        size = insn.size
        raw: list[bytes]
        if not isinstance(value, int) or (insn.op is FetchOp.ST_RAW and isinstance(value, EntryAddress)):
            raw = [bytes(size)] * (stages.count or 1)
        elif insn.op is FetchOp.ST_RAW:
            raw = [(value & (1 << 8 * size) - 1).to_bytes(size, "little")]
        else:
            start = value + insn.value
            user = insn.op is FetchOp.ST_UMEM
            places = range(start, start + size * (stages.count or 1), size)
            raw = [environment.read(place, size, user) or bytes(size) for place in places]
        shift = stages.bitfield
        if shift is None:
            return raw
        whole = (1 << 8 * shift.size) - 1
        mask = (1 << 8 * size) - 1
        left = shift.lshift
        right = shift.rshift
        numbers = [(int.from_bytes(data, "little") << left & whole) >> right & mask for data in raw]
        return [number.to_bytes(size, "little") for number in numbers]

    def fixed_part(self, elements: Elements, area: StringArea) -> bytes:
        del area
        return b"".join(filter(None, elements))

    def value(self, payload: bytes, at: int) -> int:
        """Return the number at byte `at` of an entry's payload."""
        return int.from_bytes(payload[at : at + self.size], "little", signed=self.is_signed)

    def text(self, payload: bytes, at: int, symbols: KernelSymbols) -> str:
        del symbols
        return str(self.value(payload, at))


class Hexadecimal(Number):
    """A number that is shown in hexadecimal."""

    def text(self, payload: bytes, at: int, symbols: KernelSymbols) -> str:
        del symbols
        return hex(self.value(payload, at))


class Character(Number):
    """A byte that is shown as a character in quotes, without escapes."""

    def text(self, payload: bytes, at: int, symbols: KernelSymbols) -> str:
        del symbols
        return f"'{bytes_to_text(payload[at : at + 1])}'"


class SymbolType(Number):
    """An address, stored as a number and shown as symbol and offset."""

    def text(self, payload: bytes, at: int, symbols: KernelSymbols) -> str:
        return sprint_symbol(symbols, self.value(payload, at))


class String(FetchType):
    """A string at the address that the argument's expression yields, in kernel or user memory.

    In an array, the elements in memory are pointers to strings.
    """

    is_dynamic = True
    _store_op: ClassVar[FetchOp | None] = None
    """The store operation of the type; None if the last dereference decides which memory is read."""

    def source_error(self, source: FetchOp) -> ProbeError | None:
        return None if source in _STRING_SOURCES else ProbeError.BAD_STRING

    def with_store(self, code: FetchProgram, *, is_array: bool) -> FetchProgram:
        last = code[-1]
        if is_array or last.op in _ADDRESS_SOURCES:
            return (*code, FetchInsn(self._store_op or FetchOp.ST_STRING, size=self.size))
        op = FetchOp.ST_USTRING if last.op is FetchOp.UDEREF else FetchOp.ST_STRING
        return (*code[:-1], replace(last, op=self._store_op or op, size=self.size))

    def fetch(self, stages: FetchStages, environment: FetchEnvironment) -> Elements:
        value = environment.follow(environment.load(stages.load), stages.derefs)
        pointer = stages.pointer
        store = stages.store
        if not stages.count:
            return [self._string(value, store, environment)]
        if pointer is None or not isinstance(value, int):
            return [None] * stages.count
        table = range(value, value + stages.count * environment.word_size, environment.word_size)
        return [self._string(environment.follow(place, (pointer,)), store, environment) for place in table]

    def _string(self, value: Value | None, store: FetchInsn, environment: FetchEnvironment) -> bytes | None:
        if value is None:
            return None
        if isinstance(value, bytes):
            return value.partition(b"\0")[0] + b"\0"
        return self._string_at(
            value + store.value & environment.mask, store.op is FetchOp.ST_USTRING, environment
        )

    def _string_at(self, address: int, user: bool, environment: FetchEnvironment) -> bytes | None:
        """Return the string at `address` with its NUL, or None, which `trace` shows as "(fault)".

        The result is None if the string cannot be read. It is also None for an empty string in user memory,
        which Linux does not tell from a fault. If `user` is set, an address in kernel space cannot be read.
        Mirrors: mm/maccess.c:strncpy_from_user_nofault, kernel/trace/trace_kprobe.c:fetch_store_string
        (v6.1).
        """
        read = environment.read
        text = read_string(lambda at, size: read(at, size, user), address, MAX_STRING_SIZE)
        return None if text == b"\0" and (user or environment.is_user(address)) else text

    def fixed_part(self, elements: Elements, area: StringArea) -> bytes:
        return b"".join([area.add(text) for text in elements])

    def text(self, payload: bytes, at: int, symbols: KernelSymbols) -> str:
        """Return the quoted string, or "(fault)" if its length in __data_loc is 0.

        Linux: a length other than 0 is ignored, because the string ends at its NUL.
        """
        del symbols
        place, length = _DATA_LOC.unpack_from(payload, at)
        if not length:
            return "(fault)"
        string = payload[place - COMMON_SIZE :].partition(b"\0")[0]
        return f'"{bytes_to_text(string)}"'


class UserString(String):
    """A string that is always read from user memory (type ustring)."""

    _store_op = FetchOp.ST_USTRING


class SymbolString(String):
    """An address, stored as the text of its symbol and offset (type symstr)."""

    def source_error(self, source: FetchOp) -> ProbeError | None:
        return None if source in _SYMSTR_SOURCES else ProbeError.BAD_SYMSTRING

    def with_store(self, code: FetchProgram, *, is_array: bool) -> FetchProgram:
        del is_array
        return (*code, FetchInsn(FetchOp.ST_SYMSTR, size=self.size))

    def _string_at(self, address: int, user: bool, environment: FetchEnvironment) -> bytes | None:
        del user
        return sprint_symbol(environment.symbols, address).encode("utf-8", "surrogateescape") + b"\0"

    def fixed_part(self, elements: Elements, area: StringArea) -> bytes:
        """Return the __data_loc of each string, and add the strings to `area`.

        As in Linux, the next string in the area overwrites the NUL of a `symstr`, so the printed text of the
        `symstr` also contains that string.
        Mirrors: kernel/trace/trace_probe_tmpl.h:fetch_store_symstring (v6.1).
        """
        return b"".join([area.add(text, overlaps=True) for text in elements])


def _number(prefix: str, bits: int) -> FetchType:
    kind = Hexadecimal if prefix == "x" else Number
    wide = "L" if bits == 64 else ""
    conversion = f"0x%{wide}x" if prefix == "x" else f"%{wide}{'d' if prefix == 's' else 'u'}"
    field_type = f"{'s' if prefix == 's' else 'u'}{bits}"
    return kind(f"{prefix}{bits}", bits // 8, prefix == "s", conversion, field_type)


@cache
def fetch_types(word_size: int, interface: Interface) -> dict[str, FetchType]:
    """Return a map name -> type, for words of `word_size` bytes and the version of Linux in `interface`.

    Mirrors: kernel/trace/trace_probe.c:probe_fetch_types (v6.1).
    """
    strings = {"string": String, "ustring": UserString, "symstr": SymbolString}
    types: list[FetchType] = [
        kind(name, 4, True, '\\"%s\\"', "__data_loc char[]") for name, kind in strings.items()
    ]
    types += [_number(prefix, bits) for prefix in "usx" for bits in (8, 16, 32, 64)]
    if InterfaceRule.CHAR_TYPE in interface:
        types.append(Character("char", 1, False, "'%c'", "u8"))
    types.append(SymbolType("symbol", word_size, False, "%pS", f"u{8 * word_size}"))
    return {each.name: each for each in types}


def find_fetch_type(name: str | None, word_size: int, interface: Interface) -> FetchType | None:
    """Return the type called `name`, or None if it is unknown.

    If `name` is None, return the default type, a hexadecimal word (x32, x64). A bitfield type `bN@O/SIZE` is
    stored as uSIZE.
    Mirrors: kernel/trace/trace_probe.c:find_fetch_type (v6.1).
    """
    if name is None:
        name = f"x{8 * word_size}"
    elif name.startswith("b"):
        try:
            name = f"u{kstrtoul(name.partition('/')[2])}"
        except KernelError:
            return None
    return fetch_types(word_size, interface).get(name)


def bitfield_of(name: str | None, container: FetchType, word_bits: int) -> FetchInsn | None:
    """Return the shift operation of the bitfield type `name`, `bN@O/SIZE`, or None for other types.

    `container` is the type that stores the bitfield. `word_bits`: size of a word in bits.
    Raises: ValueError (malformed or too wide).
    Mirrors: kernel/trace/trace_probe.c:__parse_bitfield_probe_arg (v6.1).
    """
    if name is None or not name.startswith("b"):
        return None
    width, end = simple_strtoul(name[1:], word_bits)
    rest = name[1 + end :]
    first, length = simple_strtoul(rest[1:], word_bits)
    well_formed = width and rest.startswith("@") and length and rest[1 + length :].startswith("/")
    bits = 8 * container.size
    # Linux: the sum is an unsigned long, which wraps.
    used = (width + first) & (1 << word_bits) - 1
    if not well_formed or used > bits:
        raise ValueError(name)
    lshift = (bits - used) & 0xFF
    rshift = (bits - width) & 0xFF
    return FetchInsn(FetchOp.MOD_BF, size=container.size, lshift=lshift, rshift=rshift)
