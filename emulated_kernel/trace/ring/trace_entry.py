"""Entries of ring buffers: common fields, descriptions of fields, and entry types without a trace event."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum, IntFlag
from struct import Struct

from emulated_kernel.trace.symbols import KernelSymbols, print_ip
from emulated_kernel.trace.text.chars import bytes_to_text
from emulated_kernel.util.fast_dataclass import dataclass

TRACE_ENTRY = Struct("<HBBi")
"""Format of the common fields: common_type, common_flags, common_preempt_count, common_pid.

Mirrors: include/linux/trace_events.h:struct trace_entry (v6.1).
"""
COMMON_SIZE = TRACE_ENTRY.size
"""Size in bytes of the common fields before an entry's payload. Offsets of fields include this size."""


class EntryType(IntEnum):
    """common_type of entries that no trace event defines. Mirrors: kernel/trace/trace.h:trace_type (v6.1)."""

    FN = 1
    STACK = 4
    PRINT = 5
    GRAPH_RET = 10
    GRAPH_ENT = 11
    USER_STACK = 12
    RAW_DATA = 18
    FUNC_REPEATS = 19


class EntryFlag(IntFlag):
    """Bits of common_flags. Mirrors: include/linux/trace_events.h:trace_flag_type (v6.1)."""

    IRQS_OFF = 0x01
    IRQS_NOSUPPORT = 0x02
    NEED_RESCHED = 0x04
    HARDIRQ = 0x08
    SOFTIRQ = 0x10
    PREEMPT_RESCHED = 0x20
    NMI = 0x40
    BH_OFF = 0x80


@dataclass(frozen=True)
class RawEntry:
    """The input of filters and triggers: an entry with its common fields, and the CPU and task of the hit."""

    data: bytes
    cpu: int
    comm: bytes
    """The current task's name, without padding."""
    string_at: Callable[[int, bool], bytes | None]
    """Returns the string at an address, including its NUL, or None if the string cannot be read.

    The second argument is True for an address in user memory.
    """


@dataclass(frozen=True, slots=True)
class EventField:
    """The description of a field of an entry. Offset and size are in bytes; offset 0 is the entry's start."""

    type: str
    name: str
    offset: int
    size: int
    is_signed: bool
    length: int = 0
    """Number of elements if the field is an array in a static event; 0 for any other field."""

    def format_line(self) -> str:
        """Return the field's line of a `format` file. Mirrors: kernel/trace/trace_events.c:f_show (v6.1)."""
        declaration = f"{self.type} {self.name}"
        base, bracket, _ = self.type.partition("[")
        if bracket and not self.type.startswith("__data_loc"):
            declaration = f"{base} {self.name}[{self.length or ''}]"
        rest = f"offset:{self.offset};\tsize:{self.size};\tsigned:{int(self.is_signed)}"
        return f"\tfield:{declaration};\t{rest};\n"


COMMON_FIELDS = (
    EventField("unsigned short", "common_type", 0, 2, False),
    EventField("unsigned char", "common_flags", 2, 1, False),
    EventField("unsigned char", "common_preempt_count", 3, 1, False),
    EventField("int", "common_pid", 4, 4, True),
)


MARKER_SYMBOL = "tracing_mark_write"
"""Name of the kernel function whose address is in PRINT records of texts written to trace_marker."""
_U32 = Struct("<I")
_FAULTED_SIZE = 9


@dataclass(frozen=True)
class AddressStyle:
    """Settings for the printing of addresses in entries: the symbols and the trace options."""

    symbols: KernelSymbols
    word_size: int = 8
    sym_offset: bool = False
    sym_addr: bool = False
    print_parent: bool = True
    """Whether the caller in an FN entry is printed."""
    arguments: Callable[[int, bytes], str] | None = None
    """Function that returns the text of the arguments in the record of a call.

    It takes the address of the called function, and the bytes at the end of the record. The value is None if
    records of calls have no arguments.
    """

    def place(self, ip: int) -> str:
        """Return the text that shows the instruction address `ip`."""
        digits = 2 * self.word_size if self.sym_addr else 0
        return print_ip(self.symbols, ip, offset=self.sym_offset, digits=digits)

    def word(self, payload: bytes, at: int = 0) -> int:
        """Return the unsigned long at byte `at` of a payload."""
        return int.from_bytes(payload[at : at + self.word_size], "little")


def print_entry(text: bytes, ip: int, word_size: int = 8, *, is_exact: bool = False) -> bytes:
    """Return the payload of a PRINT record for `text`, which the function at the address `ip` has written.

    Unless `is_exact` is set, the record has at least space for the text "<faulted>".
    Mirrors: kernel/trace/trace.c:tracing_mark_write (v6.1).
    """
    size = max(len(text), 0 if is_exact else _FAULTED_SIZE) + 2
    line = text if text.endswith(b"\n") else text + b"\n"
    return ip.to_bytes(word_size, "little") + line.ljust(size, b"\0")


def raw_data_entry(data: bytes) -> bytes:
    """Return the payload of a RAW_DATA record: a u32 and further bytes, padded to the entry's size in Linux.

    Linux: the size counts the u32 twice and includes space for the text "<faulted>". Linux does not
    initialize the padding; here it is 0.
    Mirrors: kernel/trace/trace.c:tracing_mark_raw_write (v6.1).
    """
    size = max(len(data), _U32.size + _FAULTED_SIZE)
    return data.ljust(_U32.size + size + -size % _U32.size, b"\0")


def print_message(payload: bytes, style: AddressStyle) -> str:
    """Return the text of a PRINT record: the message without the function that wrote it."""
    return bytes_to_text(payload[style.word_size :].split(b"\0", 1)[0])


def print_place_and_message(payload: bytes, style: AddressStyle) -> str:
    """Return the text of a PRINT record: the function that wrote the message, and the message."""
    return f"{style.place(style.word(payload))}: {print_message(payload, style)}"


def _print_raw(payload: bytes, style: AddressStyle) -> str:
    return f"# {style.word(payload):x} {print_message(payload, style)}"


def stack_entry(callers: Sequence[int], word_size: int = 8) -> bytes:
    """Return the payload of a STACK record with a call chain, innermost address first."""
    words = b"".join(caller.to_bytes(word_size, "little") for caller in callers)
    return len(callers).to_bytes(word_size, "little") + words


_USER_CALLERS = 8


def user_stack_entry(tgid: int, callers: Sequence[int], word_size: int = 8) -> bytes:
    """Return the payload of a USER_STACK record: `tgid` and the addresses `callers` (at most 8)."""
    words = [tgid, *callers, *[0] * (_USER_CALLERS - len(callers))]
    return b"".join(word.to_bytes(word_size, "little") for word in words)


def _user_stack(payload: bytes, style: AddressStyle) -> str:
    """Return the text of a USER_STACK record.

    Mirrors: kernel/trace/trace_output.c:trace_user_stack_print, seq_print_user_ip (v6.1).
    """
    lines = ["<user stack trace>\n"]
    for number in range(1, _USER_CALLERS + 1):
        ip = style.word(payload, number * style.word_size)
        if not ip:
            break
        lines.append(f" =>  <{ip:0{2 * style.word_size}x}>\n")
    return "".join(lines)


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
    """Return the text of an FN record. Mirrors: kernel/trace/trace_output.c:trace_fn_trace (v6.1)."""
    func = style.word(payload)
    text = style.place(func)
    if style.arguments is not None:
        text += style.arguments(func, payload[2 * style.word_size :])
    parent = style.word(payload, style.word_size)
    return f"{text} <-{style.place(parent)}\n" if style.print_parent and parent else f"{text}\n"


def _function_raw(payload: bytes, style: AddressStyle) -> str:
    return f"{style.word(payload):x} {style.word(payload, style.word_size):x}\n"


def _function_hex(payload: bytes, style: AddressStyle) -> str:
    digits = 2 * style.word_size
    return f"{style.word(payload):0{digits}x} {style.word(payload, style.word_size):0{digits}x} "


def _function_binary(payload: bytes, style: AddressStyle) -> str:
    return bytes_to_text(payload[: 2 * style.word_size])


_REPEATS = Struct("<HHI")
"""Format of a FUNC_REPEATS record after ip and parent.

The first field is the number of repetitions. The others are the time since the latest repetition: its bits
from 32 on, and its lower 32 bits.
"""


def repeats_entry(call: bytes, count: int, ago: int) -> bytes:
    """Return the payload of a FUNC_REPEATS record for `count` repetitions of a call.

    `call`: payload of the call's FN record. `ago`: time since the latest repetition, in units of the trace
    clock.
    """
    return call + _REPEATS.pack(count, ago >> 32 & 0xFFFF, ago & 0xFFFFFFFF)


def repeats(payload: bytes, style: AddressStyle) -> tuple[int, int]:
    """Return the number of repetitions in a FUNC_REPEATS record, and the time since the latest repetition.

    The time is in units of the trace clock.
    """
    count, top, bottom = _REPEATS.unpack_from(payload, 2 * style.word_size)
    return count, top << 32 | bottom


def _repeats_raw(payload: bytes, style: AddressStyle) -> str:
    """Return the text of a FUNC_REPEATS record under option `raw`.

    Mirrors: kernel/trace/trace_output.c:trace_func_repeats_raw (v6.1).
    """
    count, ago = repeats(payload, style)
    return f"{style.word(payload)} {style.word(payload, style.word_size)} {count} {ago}\n"


EntryPrinter = Callable[[bytes, AddressStyle], str]

ENTRY_PRINTERS: dict[int, EntryPrinter] = {
    EntryType.FN: _function,
    EntryType.STACK: _stack,
    EntryType.USER_STACK: _user_stack,
    EntryType.PRINT: print_place_and_message,
    EntryType.RAW_DATA: _raw_data,
}
"""Entry type -> function that returns the text of an entry, with a newline."""

RAW_PRINTERS: dict[int, EntryPrinter] = {
    EntryType.FN: _function_raw,
    EntryType.PRINT: _print_raw,
    EntryType.RAW_DATA: _raw_data,
    EntryType.FUNC_REPEATS: _repeats_raw,
}
"""Entry type -> function that returns an entry's text under option `raw`. Other types have no raw text."""

HEX_PRINTERS: dict[int, EntryPrinter] = {EntryType.FN: _function_hex}
"""Entry type -> function that returns an entry's text under option `hex`. Other types have no hex text."""

BINARY_PRINTERS: dict[int, EntryPrinter] = {EntryType.FN: _function_binary}
"""Entry type -> function that returns the text of an entry under option `bin`, without a newline."""
