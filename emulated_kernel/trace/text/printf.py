"""printf() as print formats use it: C's conversions, and the kernel's %p with its letters."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence

from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.trace.text.sprint_symbol import sprint_symbol

Value = int | str
Conversion = Callable[[Value, KernelSymbols], str]

_CONVERSION = re.compile(
    r"%(?P<flags>[-+ #0]*)(?P<width>\d*)(?:\.(?P<precision>\d+))?"
    r"(?P<length>hh|h|ll|l|z|L)?(?P<kind>p(?:[sS]|I4|I6c)?|[diuxXocs%])"
)
_V4_MAPPED = bytes(10) + b"\xff\xff"
_ISATAP = (b"\0\0\x5e\xfe", b"\2\0\x5e\xfe")
"""What stands in front of the IPv4 address in such an interface identifier."""
_ZERO_WORDS = re.compile(r"\b0(?::0)+\b")
_LENGTHS = {"hh": 8, "h": 16, "": 32, "ll": 64, "L": 64}


def unsigned(value: Value, bits: int = 64) -> int:
    """A number as C's unsigned type of that width has it."""
    return int(value) & ((1 << bits) - 1)


def signed(value: Value, bits: int = 64) -> int:
    """A number as C's signed type of that width has it."""
    number = unsigned(value, bits)
    return number - (1 << bits) if number >> (bits - 1) else number


def compile_format(layout: str, word_size: int) -> Callable[[Sequence[Value], KernelSymbols], str]:
    """A function that formats values as `layout` says; a long has `word_size` bytes."""
    pieces = list(_pieces(layout, word_size))

    def render(values: Sequence[Value], symbols: KernelSymbols) -> str:
        rest = iter(values)
        return "".join(piece if isinstance(piece, str) else piece(next(rest), symbols) for piece in pieces)

    return render


def _pieces(layout: str, word_size: int) -> Iterator[str | Conversion]:
    at = 0
    for found in _CONVERSION.finditer(layout):
        if found.start() > at:
            yield layout[at : found.start()]
        at = found.end()
        yield "%" if found["kind"] == "%" else _conversion(found, word_size)
    if at < len(layout):
        yield layout[at:]


def _conversion(found: re.Match[str], word_size: int) -> Conversion:
    kind = found["kind"]
    if kind == "s":
        return _string(found)
    if kind.startswith("p"):
        return _POINTERS.get(kind) or _raw_pointer(2 * word_size)
    return _number(found, word_size)


def _string(found: re.Match[str]) -> Conversion:
    adjust = "<" if "-" in found["flags"] else ">"
    width, precision = int(found["width"] or 0), found["precision"]
    limit = None if precision is None else int(precision)
    return lambda value, _symbols: f"{str(value)[:limit]:{adjust}{width}}"


def _number(found: re.Match[str], word_size: int) -> Conversion:
    bits = _LENGTHS.get(found["length"] or "", 8 * word_size)
    kind = {"i": "d", "u": "d"}.get(found["kind"], found["kind"])
    wrap = signed if found["kind"] in "di" else unsigned
    flags = found["flags"]
    sign = next((each for each in "+ " if each in flags), "")
    if "-" in flags:
        spec = f"<{sign}{'#' if '#' in flags else ''}{found['width']}{kind}"
    else:
        spec = f"{sign}{'#' if '#' in flags else ''}{'0' if '0' in flags else ''}{found['width']}{kind}"
    return lambda value, _symbols: format(wrap(value, bits), spec)


def _raw_pointer(digits: int) -> Conversion:
    """Deviates: Linux hashes %p; this is what it shows under `no_hash_pointers`."""
    return lambda value, _symbols: f"{unsigned(value):0{digits}x}"


def _function_name(value: Value, symbols: KernelSymbols) -> str:
    """Mirrors: kernel/kallsyms.c:sprint_symbol_no_offset (v6.1)."""
    found = symbols.lookup(unsigned(value))
    if found is None:
        return f"{unsigned(value):#x}"
    return f"{found.name} [{found.module}]" if found.module else found.name


def _ip4_string(address: bytes) -> str:
    return ".".join(map(str, address))


def _ip6_compressed_string(address: bytes) -> str:
    """The longest run of zero words as `::`, the first of several; IPv4's of mapped and ISATAP addresses.

    Mirrors: lib/vsprintf.c:ip6_compressed_string (v6.1).
    """
    words = [f"{word:x}" for word in struct.unpack(">8H", address)]
    if address[:12] == _V4_MAPPED or address[8:12] in _ISATAP:
        words[6:] = [_ip4_string(address[12:])]
    text = ":".join(words)
    zeros = max(_ZERO_WORDS.finditer(text), key=lambda run: run.end() - run.start(), default=None)
    if zeros is None:
        return text
    return f"{text[: zeros.start()].rstrip(':')}::{text[zeros.end() :].lstrip(':')}"


def _address(size: int, as_text: Callable[[bytes], str]) -> Conversion:
    """Of the bytes of an address in a record. Mirrors: lib/vsprintf.c:ip_addr_string (v6.1)."""
    return lambda value, _symbols: as_text(unsigned(value, 8 * size).to_bytes(size, "little"))


_POINTERS: dict[str, Conversion] = {
    "pI4": _address(4, _ip4_string),
    "pI6c": _address(16, _ip6_compressed_string),
    "ps": _function_name,
    "pS": lambda value, symbols: sprint_symbol(symbols, unsigned(value)),
}
