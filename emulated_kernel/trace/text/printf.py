"""printf() for the print formats of events: C's conversions, and the kernel's %p with its letters."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from emulated_kernel.trace.symbols import KernelSymbols, sprint_symbol, sprint_symbol_no_offset
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.lazy_pattern import lazy_pattern

Value = int | str
Conversion = Callable[[Value, KernelSymbols], str]

_CONVERSION = lazy_pattern(
    r"%(?P<flags>[-+ #0]*)(?P<width>\d*|\*)(?:\.(?P<precision>\d+|\*))?"
    r"(?P<length>hh|h|ll|l|z|L)?(?P<kind>p[0-9A-Za-z]*|[diuxXocs%])"
)
_AF_INET = 2
_AF_INET6 = 10
_V4_MAPPED = bytes(10) + b"\xff\xff"
_ISATAP = (b"\0\0\x5e\xfe", b"\2\0\x5e\xfe")
"""The possible bytes before the IPv4 address in an ISATAP interface identifier."""
_ZERO_WORDS = lazy_pattern(r"\b0(?::0)+\b")
_LENGTHS = {"hh": 8, "h": 16, "": 32, "ll": 64, "L": 64}
"""Length modifier -> size of the number in bits. Other modifiers mean a long."""


def unsigned(value: Value, bits: int = 64) -> int:
    """Return a number converted to C's unsigned type of `bits` bits."""
    return int(value) & ((1 << bits) - 1)


def signed(value: Value, bits: int = 64) -> int:
    """Return a number converted to C's signed type of `bits` bits."""
    number = unsigned(value, bits)
    return number - (1 << bits) if number >> (bits - 1) else number


_WIDEST = 1 << 12
"""Maximum width or precision that an argument may request: a line is no longer than a page."""
_LONGEST_DUMP = 64
"""Maximum number of bytes that %ph prints."""


@dataclass(frozen=True)
class _Starred:
    """A conversion with `*`. Its width, its precision or both are arguments that precede its value."""

    count: int
    """Number of the arguments for width and precision."""
    of: Callable[[Sequence[int]], Conversion]
    """Takes the arguments for width and precision, in this order, and returns the conversion."""


def compile_format(layout: str, word_size: int) -> Callable[[Sequence[Value], KernelSymbols], str]:
    """Return a function that formats values as `layout` says; a long has `word_size` bytes.

    Raises: ValueError (unknown letters after %p).
    """
    pieces = list(_pieces(layout, word_size))

    def render(values: Sequence[Value], symbols: KernelSymbols) -> str:
        rest = iter(values)

        def shown(piece: str | Conversion | _Starred) -> str:
            if isinstance(piece, str):
                return piece
            if isinstance(piece, _Starred):
                piece = piece.of([int(next(rest)) for _ in range(piece.count)])
            return piece(next(rest), symbols)

        return "".join(shown(piece) for piece in pieces)

    return render


def _pieces(layout: str, word_size: int) -> Iterator[str | Conversion | _Starred]:
    at = 0
    for found in _CONVERSION.finditer(layout):
        if found.start() > at:
            yield layout[at : found.start()]
        at = found.end()
        stars = [found["width"], found["precision"]].count("*")
        if stars:
            # Unknown letters are refused here, before any record is printed.
            _with(found, word_size, [1] * stars)
            yield _Starred(stars, partial(_with, found, word_size))
        else:
            yield "%" if found["kind"] == "%" else _conversion(found, word_size)
    if at < len(layout):
        yield layout[at:]


def _with(found: re.Match[str], word_size: int, values: Sequence[int]) -> Conversion:
    """Return the conversion for `found`, a match of _CONVERSION, with `values` in the place of each `*`.

    Mirrors: lib/vsprintf.c:set_field_width, set_precision, hex_string (v6.1).
    """
    *widths, last = (max(-_WIDEST, min(value, _WIDEST)) for value in values)
    if found["precision"] == "*":
        last = max(last, 0)
    if found["kind"] in _SEPARATORS:
        size = widths[0] if widths else last
        return _dump(max(0, min(size, _LONGEST_DUMP)), _SEPARATORS[found["kind"]])
    if found["kind"] == _BIT_LIST:
        return _bit_list(max(0, widths[0] if widths else last))
    text = found[0]
    for value in (*widths, last):
        text = text.replace("*", str(value), 1)
    without_stars = _CONVERSION.match(text)
    assert without_stars is not None
    return _conversion(without_stars, word_size)


def _conversion(found: re.Match[str], word_size: int) -> Conversion:
    kind = found["kind"]
    if kind == "s":
        return _string(found)
    if kind in _SEPARATORS:
        return _dump(int(found["width"] or 1), _SEPARATORS[kind])
    if kind == "p":
        # Deviates: Linux hashes %p; the text is that of a kernel booted with `no_hash_pointers`.
        return lambda value, _symbols: f"{unsigned(value):0{2 * word_size}x}"
    if kind.startswith("p"):
        if kind not in _POINTERS:
            raise ValueError(f"print fmt: no conversion %{kind}")
        return _POINTERS[kind]
    return _number(found, word_size)


def _string(found: re.Match[str]) -> Conversion:
    adjust = "<" if "-" in found["flags"] else ">"
    width = int(found["width"] or 0)
    precision = found["precision"]
    limit = None if precision is None else int(precision)
    return lambda value, _symbols: f"{str(value)[:limit]:{adjust}{width}}"


def _number(found: re.Match[str], word_size: int) -> Conversion:
    bits = _LENGTHS.get(found["length"] or "", 8 * word_size)
    kind = {"i": "d", "u": "d"}.get(found["kind"], found["kind"])
    wrap = signed if found["kind"] in "di" else unsigned
    flags = found["flags"]
    sign = next((each for each in "+ " if each in flags), "")
    align = "<" if "-" in flags else ""
    zeros = "0" if "0" in flags and not align else ""
    spec = f"{align}{sign}{'#' if '#' in flags else ''}{zeros}{found['width']}{kind}"
    return lambda value, _symbols: format(wrap(value, bits), spec)


def _ip4_string(address: bytes) -> str:
    return ".".join(str(byte) for byte in address)


def _ip6_compressed_string(address: bytes) -> str:
    """Return the text of an IPv6 address, in which `::` replaces the first of the longest runs of zero words.

    The last 4 bytes of mapped and ISATAP addresses are printed as an IPv4 address.
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
    """Return a conversion for `size` bytes of a record, such as a network address.

    `as_text` converts the bytes to text.

    Mirrors: lib/vsprintf.c:ip_addr_string (v6.1).
    """
    return lambda value, _symbols: as_text(unsigned(value, 8 * size).to_bytes(size, "little"))


def _socket_address(address: bytes) -> str:
    """Return the text of a struct sockaddr: address and port.

    Mirrors: lib/vsprintf.c:ip4_addr_string_sa, ip6_addr_string_sa (v6.1).
    """
    family = struct.unpack("<H", address[:2])[0]
    port = struct.unpack(">H", address[2:4])[0]
    if family == _AF_INET:
        return f"{_ip4_string(address[4:8])}:{port}"
    return f"[{_ip6_compressed_string(address[8:24])}]:{port}" if family == _AF_INET6 else "(einval)"


def _guid(data: bytes) -> str:
    """Return the text of a GUID, whose first three fields are little-endian."""
    return _uuid(data[3::-1] + data[5:3:-1] + data[7:5:-1] + data[8:])


def _bit_list(bits: int) -> Conversion:
    """Return a conversion that prints which of the lowest `bits` bits are set, as ranges such as `0-2,5`.

    Mirrors: lib/vsprintf.c:bitmap_list_string (v6.1).
    """

    def text(value: Value, _symbols: KernelSymbols) -> str:
        number = unsigned(value, bits)
        found: list[list[int]] = []
        for bit in (at for at in range(number.bit_length()) if number >> at & 1):
            if found and found[-1][1] == bit - 1:
                found[-1][1] = bit
            else:
                found.append([bit, bit])
        return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in found)

    return text


def _uuid(data: bytes) -> str:
    """Return the text of a UUID. Mirrors: lib/vsprintf.c:uuid_string (v6.1)."""
    text = data.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _dump(size: int, separator: str) -> Conversion:
    """Return a conversion that prints `size` bytes in hexadecimal, with a separator between them.

    Mirrors: lib/vsprintf.c:hex_string (v6.1).
    """
    return _address(size, lambda data: separator.join(f"{byte:02x}" for byte in data))


_BIT_LIST = "pbl"
_SEPARATORS = {"ph": " ", "phC": ":", "phD": "-", "phN": ""}
_POINTERS: dict[str, Conversion] = {
    "pISpc": _address(28, _socket_address),
    "pM": _dump(6, ":"),
    "pU": _address(16, _uuid),
    "pUb": _address(16, _uuid),
    "pUl": _address(16, _guid),
    "pI4": _address(4, _ip4_string),
    "pI6c": _address(16, _ip6_compressed_string),
    "ps": lambda value, symbols: sprint_symbol_no_offset(symbols, unsigned(value)),
    "pS": lambda value, symbols: sprint_symbol(symbols, unsigned(value)),
}
