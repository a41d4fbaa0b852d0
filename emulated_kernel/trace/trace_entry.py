"""Records: the header that starts each one, and the types that are no trace events of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from struct import Struct
from typing import Protocol

from emulated_kernel.abi import PAGE_SIZE
from emulated_kernel.trace.chars import bytes_to_text
from emulated_kernel.trace.ports import TraceSymbols
from emulated_kernel.trace.symbols import print_ip

TRACE_ENTRY = Struct("<HBBi")
"""common_type, common_flags, common_preempt_count, common_pid. Mirrors: struct trace_entry (v6.1)."""


class EntryType(IntEnum):
    """Types that no trace event defines. Mirrors: kernel/trace/trace.h:trace_type (v6.1)."""

    FN = 1
    STACK = 4
    PRINT = 5
    GRAPH_RET = 10
    GRAPH_ENT = 11
    RAW_DATA = 18
    FUNC_REPEATS = 19


class EntryFlag(IntFlag):
    """common_flags. Mirrors: include/linux/trace_events.h:trace_flag_type (v6.1)."""

    IRQS_OFF = 0x01
    IRQS_NOSUPPORT = 0x02
    NEED_RESCHED = 0x04
    HARDIRQ = 0x08
    SOFTIRQ = 0x10
    PREEMPT_RESCHED = 0x20
    NMI = 0x40
    BH_OFF = 0x80


class PrintableEvent(Protocol):
    """A trace event, as far as printing its records goes."""

    def print_line(self, payload: bytes, symbols: TraceSymbols, *, sym_addr: bool = False) -> str:
        """What a line says behind the time; `payload` is the record behind its trace_entry."""


class EventTable(Protocol):
    """The trace events of a kernel."""

    def by_id(self, event_id: int) -> PrintableEvent | None:
        """The event whose records have this common_type."""


MARKER_SYMBOL = "tracing_mark_write"
_U32 = Struct("<I")
_FAULTED_SIZE = 9


def marker_ip(word_size: int) -> int:
    """Where trace_marker is written from. Deviates: that is host code, at no guest address."""
    return (1 << 8 * word_size) - PAGE_SIZE


@dataclass(frozen=True)
class AddressStyle:
    """How records name addresses: their size in bytes and the options sym-offset and sym-addr."""

    symbols: TraceSymbols
    word_size: int = 8
    sym_offset: bool = False
    sym_addr: bool = False
    print_parent: bool = True
    """Whether a function's caller is named too."""

    def place(self, ip: int) -> str:
        """Where something happened."""
        digits = 2 * self.word_size if self.sym_addr else 0
        if ip == marker_ip(self.word_size):
            return MARKER_SYMBOL + (f" <{ip:0{digits}x}>" if digits else "")
        return print_ip(self.symbols, ip, offset=self.sym_offset, digits=digits)

    def word(self, payload: bytes, at: int = 0) -> int:
        """The unsigned long at an offset of a payload."""
        return int.from_bytes(payload[at : at + self.word_size], "little")


def print_entry(text: bytes, word_size: int = 8) -> bytes:
    """The payload of a PRINT record for a marker `text`.

    Mirrors: kernel/trace/trace.c:tracing_mark_write (v6.1), which makes room for the text "<faulted>".
    """
    size = max(len(text), _FAULTED_SIZE) + 2
    line = text if text.endswith(b"\n") else text + b"\n"
    return marker_ip(word_size).to_bytes(word_size, "little") + line.ljust(size, b"\0")


def print_message(payload: bytes, style: AddressStyle) -> str:
    """What a PRINT record says, without who said it."""
    return bytes_to_text(payload[style.word_size :].split(b"\0", 1)[0])


def print_place_and_message(payload: bytes, style: AddressStyle) -> str:
    """What a PRINT record says, and who said it."""
    return f"{style.place(style.word(payload))}: {print_message(payload, style)}"


def _print_raw(payload: bytes, style: AddressStyle) -> str:
    return f"# {style.word(payload):x} {print_message(payload, style)}"


def stack_entry(callers: Sequence[int], word_size: int = 8) -> bytes:
    """The payload of a STACK record: return addresses, innermost first."""
    words = b"".join(caller.to_bytes(word_size, "little") for caller in callers)
    return len(callers).to_bytes(word_size, "little") + words


def _stack(payload: bytes, style: AddressStyle) -> str:
    (size,) = _U32.unpack_from(payload)
    step = style.word_size
    lines = ["<stack trace>\n"]
    for at in range(step, min(step + size * step, len(payload) - step + 1), step):
        caller = style.word(payload, at)
        if caller == (1 << 8 * step) - 1:
            break
        lines.append(f" => {style.place(caller)}\n")
    return "".join(lines)


def _raw_data(payload: bytes, _style: AddressStyle) -> str:
    (number,) = _U32.unpack_from(payload)
    dump = "".join(f" {byte:02x}" for byte in payload[4:])
    return f"# {number:x} buf:{dump}\n"


def _function(payload: bytes, style: AddressStyle) -> str:
    """Mirrors: kernel/trace/trace_output.c:trace_fn_trace (v6.1)."""
    text, parent = style.place(style.word(payload)), style.word(payload, style.word_size)
    return f"{text} <-{style.place(parent)}\n" if style.print_parent and parent else f"{text}\n"


def _function_raw(payload: bytes, style: AddressStyle) -> str:
    return f"{style.word(payload):x} {style.word(payload, style.word_size):x}\n"


_REPEATS = Struct("<HHI")
"""count, and the upper and lower bits of the time since the latest call."""


def repeats_entry(call: bytes, count: int, ago: int) -> bytes:
    """The payload of a FUNC_REPEATS record: `call` is that of the FN record which the calls are like."""
    return call + _REPEATS.pack(count, ago >> 32 & 0xFFFF, ago & 0xFFFFFFFF)


def repeats(payload: bytes, style: AddressStyle) -> tuple[int, int]:
    """How many calls the record stands for, and how long ago the latest one was."""
    count, top, bottom = _REPEATS.unpack_from(payload, 2 * style.word_size)
    return count, top << 32 | bottom


def _repeats_raw(payload: bytes, style: AddressStyle) -> str:
    """Mirrors: kernel/trace/trace_output.c:trace_func_repeats_raw (v6.1)."""
    count, ago = repeats(payload, style)
    return f"{style.word(payload)} {style.word(payload, style.word_size)} {count} {ago}\n"


EntryPrinter = Callable[[bytes, AddressStyle], str]

ENTRY_PRINTERS: dict[int, EntryPrinter] = {
    EntryType.FN: _function,
    EntryType.STACK: _stack,
    EntryType.PRINT: print_place_and_message,
    EntryType.RAW_DATA: _raw_data,
}
"""Texts of the types that no trace event defines, newline included."""

RAW_PRINTERS: dict[int, EntryPrinter] = {
    EntryType.FN: _function_raw,
    EntryType.PRINT: _print_raw,
    EntryType.RAW_DATA: _raw_data,
    EntryType.FUNC_REPEATS: _repeats_raw,
}
"""The same under the option `raw`; other types have no such text."""
