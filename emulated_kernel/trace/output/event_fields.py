"""Text of a record with option `fields`: the fields' names and values instead of the event's own text."""

from __future__ import annotations

from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.filter.fields import FilterType, filter_type_of
from emulated_kernel.trace.ring.trace_entry import COMMON_SIZE, EventField
from emulated_kernel.trace.symbols import KernelSymbols, sprint_symbol
from emulated_kernel.trace.text.chars import bytes_to_text

_OVERFLOW = "<OVERFLOW>"
_PRINTABLE = range(0x20, 0x7F)


def fields_text(event: TraceEvent, payload: bytes, symbols: KernelSymbols, *, shows_symbols: bool) -> str:
    """Return `EVENT: FIELD=VALUE FIELD=VALUE` for a record. `payload`: its data after the common fields.

    If `shows_symbols` is set, show words of 64 bits as symbols, and add the bytes of strings that have
    unprintable characters.
    Mirrors: kernel/trace/trace_output.c:print_event_fields, print_fields (v6.12, v7.2).
    """
    if not event.fields:
        return f"{event.name}:No fields found\n"
    shown = []
    for field in event.fields:
        value = _OVERFLOW
        if field.offset - COMMON_SIZE + field.size <= len(payload):
            value = _value(field, payload, symbols, shows_symbols=shows_symbols)
        shown.append(f" {field.name}={value}")
    return f"{event.name}:{''.join(shown)}\n"


def _number(payload: bytes, field: EventField, *, signed: bool = False) -> int:
    at = field.offset - COMMON_SIZE
    return int.from_bytes(payload[at : at + field.size], "little", signed=signed)


def _value(field: EventField, payload: bytes, symbols: KernelSymbols, *, shows_symbols: bool) -> str:
    match filter_type_of(field.type):
        case FilterType.STATIC_STRING:
            at = field.offset - COMMON_SIZE
            return _string(payload[at : at + field.size])
        case FilterType.DYN_STRING:
            data = _located(field, payload)
            return _OVERFLOW if data is None else _dynamic_string(data, shows_bytes=shows_symbols)
        case FilterType.PTR_STRING:
            # Deviates: Linux adds the string if it is readable, and 7.2 shows the address of the field.
            return f"({_number(payload, field):#0{2 + 2 * field.size}x})"
        case FilterType.OTHER:
            return _other(field, payload, symbols, shows_symbols=shows_symbols)
    return "<INVALID-TYPE>"


def _other(field: EventField, payload: bytes, symbols: KernelSymbols, *, shows_symbols: bool) -> str:
    number = _number(payload, field)
    signed = _number(payload, field, signed=True)
    match field.size:
        case 1:
            return (f"'{chr(number)}'" if number in _PRINTABLE else "") + f"({number})"
        case 2:
            return f"{number:#x} ({number})"
        case 4 if "__data_loc" in field.type:
            data = _located(field, payload)
            return _OVERFLOW if data is None else ",".join(f"{byte:02x}" for byte in data)
        case 4:
            return f"{number:#x} ({signed})"
        case 8 if shows_symbols:
            return f"{sprint_symbol(symbols, number)} ({signed})"
        case 8:
            return f"{number:#x} ({signed})"
    return "<INVALID-SIZE>"


def _located(field: EventField, payload: bytes) -> bytes | None:
    """Return the data to which a `__data_loc` field points, or None if the data is not within the record."""
    location = _number(payload, field)
    start = (location & 0xFFFF) - COMMON_SIZE
    end = start + (location >> 16)
    return payload[start:end] if start >= 0 and end <= len(payload) else None


def _string(data: bytes) -> str:
    return bytes_to_text(data.partition(b"\0")[0])


def _dynamic_string(data: bytes, *, shows_bytes: bool) -> str:
    """Return the string `data` as text.

    If `shows_bytes` is True and some bytes are not printable, show these as `.`, and append all bytes in hex.
    """
    if not shows_bytes or all(byte in _PRINTABLE for byte in data if byte):
        return _string(data)
    text = "".join(chr(byte) if byte in _PRINTABLE else "." for byte in data)
    return f"{text} ({data.hex(':')})"
