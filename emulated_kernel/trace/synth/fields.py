"""Fields of synthetic events: types, sizes, and the storage and text of their values."""

from __future__ import annotations

import errno
import struct
from abc import ABC, abstractmethod
from typing import ClassVar

from emulated_kernel.trace.ring.trace_entry import COMMON_SIZE
from emulated_kernel.trace.symbols import KernelSymbols, sprint_symbol
from emulated_kernel.trace.text.chars import bytes_to_text
from emulated_kernel.trace.text.numbers import kstrtoul
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.fast_named_tuple import NamedTuple

STRING_MAX = 256
"""Maximum size in bytes of a string with its NUL.

In an entry, a string of a declared size takes this many bytes, regardless of the declared size.
"""
_STACK_WORDS = 31
"""Maximum number of words of a call chain in an entry, including the word that holds its length."""
_DATA_LOC = "__data_loc "
_SIZES_AND_FORMATS = {
    "s64": (8, "%lld"),
    "u64": (8, "%llu"),
    "s32": (4, "%d"),
    "u32": (4, "%u"),
    "s16": (2, "%d"),
    "u16": (2, "%u"),
    "s8": (1, "%d"),
    "u8": (1, "%u"),
    "char": (1, "%d"),
    "unsigned char": (1, "%u"),
    "int": (4, "%d"),
    "unsigned int": (4, "%u"),
    "long": (8, "%ld"),
    "unsigned long": (8, "%lu"),
    "bool": (1, "%d"),
    "pid_t": (4, "%d"),
    "gfp_t": (4, "%x"),
}
"""Type -> (size in bytes, conversion in the event's print format).

Mirrors: kernel/trace/trace_events_synth.c:synth_field_size, synth_field_fmt (v6.1).
"""
_WORDS = ("long", "unsigned long")
"""Types that have the size of the guest's long."""


class ValueType(NamedTuple):
    """The type of a value that a histogram can supply, which is a variable or another of its fields."""

    name: str
    size: int
    """Size of a value in bytes."""
    is_signed: bool
    is_call_chain: bool


@dataclass(frozen=True)
class SyntheticField(ABC):
    """Base class of a synthetic event's fields.

    Mirrors: kernel/trace/trace_synth.h:struct synth_field (v6.1).
    """

    type: str
    """The type as the `format` file shows it."""
    name: str
    size: int
    """Size of the declared type in bytes; 8 for a string of any size or a call chain."""
    room: ClassVar[int] = 8
    """Size of the field in the fixed part of an entry, in bytes."""

    @property
    def is_signed(self) -> bool:
        return not self.type.startswith("u") and self.type != "gfp_t"

    @property
    def declaration(self) -> str:
        """The declaration of the field, `TYPE NAME`, as synthetic_events shows it."""
        return f"{self.type.removeprefix(_DATA_LOC)} {self.name}"

    @property
    def print_fmt(self) -> str:
        """The field's conversion specification in the event's print format."""
        return "%s"

    @property
    def print_value(self) -> str:
        """The C expression for the field's value in the event's print format, such as `REC->NAME`."""
        return f"REC->{self.name}"

    def takes(self, given: ValueType) -> bool:
        """Return True if the field can hold the value of a variable of the type `given`.

        Mirrors: kernel/trace/trace_events_hist.c:check_synth_field (v6.1).
        """
        return not given.is_call_chain and (given.name == self.type or given.size == self.size)

    @abstractmethod
    def parts(self, value: int | bytes, end: int) -> tuple[bytes, bytes]:
        """Encode a value: return its bytes in the fixed part of an entry, and bytes to append to the entry.

        `value`: a number, or the bytes of a string or call chain; a value of the wrong kind counts as 0 or
        empty. `end`: offset of the appended bytes in the entry.
        """

    @abstractmethod
    def text(self, payload: bytes, at: int, symbols: KernelSymbols) -> str:
        """Return the text that `trace` shows for the value at byte `at` of an entry's payload."""


class NumberField(SyntheticField):
    """A number, which takes 8 bytes in an entry regardless of its declared type."""

    @property
    def print_fmt(self) -> str:
        return _SIZES_AND_FORMATS[self.type][1]

    def takes(self, given: ValueType) -> bool:
        is_alike = (given.size, given.is_signed) == (self.size, self.is_signed)
        return not given.is_call_chain and (given.name == self.type or is_alike)

    def parts(self, value: int | bytes, end: int) -> tuple[bytes, bytes]:
        del end
        number = value if isinstance(value, int) else 0
        return (number & (1 << 8 * self.size) - 1).to_bytes(8, "little"), b""

    def text(self, payload: bytes, at: int, symbols: KernelSymbols) -> str:
        """Return the number in decimal; for the type gfp_t, in hexadecimal without and with the prefix 0x.

        As in Linux, numbers of 1 and 2 bytes are printed as unsigned, even if their type is signed.
        """
        del symbols
        is_signed = self.is_signed and self.size > 2
        value = int.from_bytes(payload[at : at + self.size], "little", signed=is_signed)
        # Deviates: Linux prints the names of the flags.
        return f"{value:x} ({value:#x})" if self.type == "gfp_t" else str(value)


class StringField(SyntheticField):
    """A string of a declared size, stored in the fixed part of an entry."""

    room = STRING_MAX

    def parts(self, value: int | bytes, end: int) -> tuple[bytes, bytes]:
        del end
        data = value if isinstance(value, bytes) else b""
        return data[:STRING_MAX].ljust(STRING_MAX, b"\0"), b""

    def text(self, payload: bytes, at: int, symbols: KernelSymbols) -> str:
        del symbols
        return bytes_to_text(payload[at : at + STRING_MAX].partition(b"\0")[0])


class DynamicStringField(SyntheticField):
    """A string of any size, stored after the fixed part of an entry."""

    @property
    def print_value(self) -> str:
        return f"__get_str({self.name})"

    def takes(self, given: ValueType) -> bool:
        return "char[" in given.name or super().takes(given)

    def parts(self, value: int | bytes, end: int) -> tuple[bytes, bytes]:
        data = (value if isinstance(value, bytes) else b"") + b"\0"
        return (end | len(data) << 16).to_bytes(8, "little"), data

    def text(self, payload: bytes, at: int, symbols: KernelSymbols) -> str:
        del symbols
        return bytes_to_text(self._data(payload, at).partition(b"\0")[0])

    @staticmethod
    def _data(payload: bytes, at: int) -> bytes:
        place, length = struct.unpack_from("<HH", payload, at)
        start = place - COMMON_SIZE
        return payload[start : start + length]


@dataclass(frozen=True)
class StackField(DynamicStringField):
    """A call chain, stored after the fixed part of an entry as its length and the callers, in guest words."""

    word_size: int
    """Size in bytes of a guest word."""

    @property
    def print_value(self) -> str:
        return f"__get_stacktrace({self.name})"

    def takes(self, given: ValueType) -> bool:
        return given.is_call_chain

    def parts(self, value: int | bytes, end: int) -> tuple[bytes, bytes]:
        """Encode a call chain: return its __data_loc for the fixed part of an entry, and the bytes to append.

        The appended bytes are the chain's length and the callers, as guest words. `value`: the callers, 8
        bytes each; a number is an empty chain. `end`: offset of the chain in the entry.
        Mirrors: kernel/trace/trace_events_synth.c:trace_stack (v6.12).
        """
        chain = _words(value, 8) if isinstance(value, bytes) else []
        # Linux: the length counts as one of the words, of which at most 31 are copied.
        words = [len(chain), *chain][:_STACK_WORDS] if chain else []
        data = b"".join(word.to_bytes(self.word_size, "little") for word in words)
        return (end | len(data) << 16).to_bytes(8, "little"), data

    def text(self, payload: bytes, at: int, symbols: KernelSymbols) -> str:
        callers = unpack_call_chain(self._data(payload, at), self.word_size)
        return "STACK:\n" + "".join(f"=> {sprint_symbol(symbols, caller)}\n" for caller in callers)


def _words(data: bytes, size: int) -> list[int]:
    return [int.from_bytes(data[at : at + size], "little") for at in range(0, len(data), size)]


def unpack_call_chain(data: bytes, word_size: int) -> list[int]:
    """Return the callers of a stored call chain. `data` begins with the chain's length, which is skipped."""
    return _words(data, word_size)[1:]


def make_field(type_: str, name: str, word_size: int) -> SyntheticField | None:
    """Create a field of a declared type; return None if the type is unknown.

    A long has `word_size` bytes.
    Raises: KernelError EINVAL (a malformed array, or a string that is too long).
    Mirrors: kernel/trace/trace_events_synth.c:parse_synth_field (v6.1).
    """
    if type_ in _SIZES_AND_FORMATS:
        size = word_size if type_ in _WORDS else _SIZES_AND_FORMATS[type_][0]
        return NumberField(type_, name, size)
    if "char[" in type_:
        size = _string_size(type_)
        if size:
            return StringField(type_, name, size)
        return DynamicStringField(_DATA_LOC + type_, name, 8)
    return StackField(_DATA_LOC + type_, name, 8, word_size) if "long[" in type_ else None


def _string_size(type_: str) -> int:
    """Return the declared size of a string in bytes, or 0 for a string of any size.

    Raises: KernelError EINVAL (a malformed array, or a string that is too long).
    Mirrors: kernel/trace/trace_events_synth.c:synth_field_string_size (v6.1).
    """
    digits, bracket, rest = type_.partition("char[")[2].partition("]")
    if not bracket or rest or len(digits) > 3:
        raise KernelError(errno.EINVAL, f"{type_}: malformed array; write char[SIZE] or char[]")
    size = kstrtoul(digits, bits=32) if digits else 0
    if size > STRING_MAX:
        raise KernelError(errno.EINVAL, f"{type_}: the string is too long; at most {STRING_MAX} bytes fit")
    return size
