"""Fields of synthetic events: types, sizes, and how a value is stored and printed."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass

from emulated_kernel.errors import KernelError
from emulated_kernel.trace.chars import bytes_to_text
from emulated_kernel.trace.numbers import kstrtoul
from emulated_kernel.trace.ports import TraceSymbols
from emulated_kernel.trace.symbols import sprint_symbol

STRING_MAX = 256
"""Bytes of a string and its NUL; one of fixed size takes so many in an entry."""
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
"""Mirrors: kernel/trace/trace_events_synth.c:synth_field_size, synth_field_fmt (v6.1)."""
_WORDS = ("long", "unsigned long")
_RENDER: dict[str, Callable[[int], str]] = {
    "%d": lambda value: str(value - (value >> 31 << 32)),
    "%ld": lambda value: str(value - (value >> 63 << 64)),
    "%lld": lambda value: str(value - (value >> 63 << 64)),
    "%x": lambda value: f"{value:x}",
}


@dataclass(frozen=True)
class SyntheticField:
    """Mirrors: kernel/trace/trace_synth.h:struct synth_field (v6.1)."""

    type: str
    """As in `format`."""
    name: str
    size: int
    is_dynamic: bool

    @property
    def is_string(self) -> bool:
        return "char[" in self.type

    @property
    def is_stack(self) -> bool:
        return not self.is_string and "long[" in self.type

    @property
    def is_signed(self) -> bool:
        return not self.type.startswith("u") and self.type != "gfp_t"

    @property
    def room(self) -> int:
        """Bytes in the fixed part of an entry."""
        return STRING_MAX if self.is_string and not self.is_dynamic else 8

    @property
    def print_fmt(self) -> str:
        """As in `print fmt:`."""
        return "%s" if self.is_string or self.is_stack else _SIZES_AND_FORMATS[self.type][1]

    @property
    def declaration(self) -> str:
        """As in synthetic_events."""
        return f"{self.type.removeprefix(_DATA_LOC)} {self.name}"

    def takes(self, type_: str, size: int, is_signed: bool) -> bool:
        """Whether a variable of that type can be its value. Mirrors: check_synth_field (v6.1)."""
        if self.is_string and self.is_dynamic and "char[" in type_:
            return True
        if self.is_stack:
            return False
        return type_ == self.type or (size == self.size and (self.is_string or is_signed is self.is_signed))

    def number_text(self, value: int) -> str:
        """A number as `trace` shows it. Linux: those of 1 and 2 bytes are unsigned, whatever their type."""
        fmt = "%d" if self.print_fmt == "%ld" and self.size == 4 else self.print_fmt
        text = _RENDER.get(fmt, str)(value)
        # Deviates: Linux names the flags.
        return f"{text} ({value:#x})" if self.type == "gfp_t" else text

    def dynamic_text(self, data: bytes, symbols: TraceSymbols) -> str:
        """A string or stack, from its bytes."""
        if not self.is_stack:
            return bytes_to_text(data.partition(b"\0")[0])
        words = (int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8))
        return "STACK:\n" + "".join(f"=> {sprint_symbol(symbols, word)}\n" for word in words if word)


def make_field(type_: str, name: str, word_size: int) -> SyntheticField | None:
    """The field of a declared type, where an `unsigned long` has `word_size` bytes; None for an unknown one.

    Raises: KernelError EINVAL, ERANGE for a wrong array. Mirrors: parse_synth_field (v6.1).
    """
    if type_ in _SIZES_AND_FORMATS:
        size = word_size if type_ in _WORDS else _SIZES_AND_FORMATS[type_][0]
        return SyntheticField(type_, name, size, False)
    if "char[" in type_:
        size = _string_size(type_)
        if size:
            return SyntheticField(type_, name, size, False)
    elif "long[" not in type_:
        return None
    return SyntheticField(_DATA_LOC + type_, name, 8, True)


def _string_size(type_: str) -> int:
    """0 for one of any length. Mirrors: synth_field_string_size (v6.1)."""
    digits, bracket, rest = type_.partition("char[")[2].partition("]")
    if not bracket or rest or len(digits) > 3:
        raise KernelError(errno.EINVAL, "malformed array")
    size = kstrtoul(digits, bits=32) if digits else 0
    if size > STRING_MAX:
        raise KernelError(errno.EINVAL, "the string is too long")
    return size
