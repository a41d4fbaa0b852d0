"""Search for the kallsyms tables in a kernel image, by pattern, because no symbol names their address.

scripts/kallsyms.c writes the tables in one of two orders. The tables are num_syms; names, each a sequence of
token numbers; markers, the offset of each 256th name; a token table and its index; and addresses. Addresses
are absolute or offsets from a base; offsets of per-CPU variables may be absolute. v6.2 added sequence
numbers. Since v7.0, tables are aligned to 4 bytes in place of 8, and an address is an offset from its own
entry.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import pairwise

from emulated_kernel.image.kallsyms import Symbol
from emulated_kernel.image.linux.vmlinux import LinkedMemory, LoadSegment
from emulated_kernel.util.fast_dataclass import dataclass

_TOKENS = 256
_MARKED = 256
"""Number of symbol names from one marker to the next."""
_DIGITS = b"\0" + b"".join(b"%d\0" % digit for digit in range(10))
"""Bytes by which the token table is found: the end of a token, and then the tokens for "0" to "9"."""
_FIRST_DIGIT = ord("0")
_TOKEN_TABLE_LIMIT = 1 << 14
_TYPES = frozenset(bytes((letter,)) for letter in b"aAbBcCdDgGiInNpPrRsStTuUvVwW-?")
_NAMES_LIMIT = 1 << 26
"""Size in bytes of the area before the token table in which the names are searched."""
_MAX_SYMBOLS = 1 << 22
_MAX_TABLES = 64
"""Maximum number of candidate token tables: a hostile image can be full of them."""
_ALIGNMENT = 8
_PACKED = 4
"""Alignment in bytes of the kallsyms tables since v7.0."""
_LONGEST = 1 << 9
"""Maximum size in bytes of a symbol's packed name."""


@dataclass(slots=True)
class _Budget:
    """Limit on the number of symbol names to decode: a hostile image can contain many false tables."""

    names: int


@dataclass(frozen=True, slots=True)
class _Tokens:
    start: int
    """Offset of the token table in the segment that contains it."""
    end: int
    """Offset of the end of the token index in the segment."""
    texts: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class _Names:
    start: int
    """Offset of num_syms in the segment that contains it."""
    names: list[bytes]
    """The symbol names, each prefixed with the letter of its type."""


def find_symbols(vmlinux: LinkedMemory) -> list[Symbol]:
    """Return the symbols in a kernel's kallsyms tables, in table order, without sizes; [] without tables.

    The layouts of v5.0 to v7.3 are known.
    Mirrors: kernel/kallsyms.c:kallsyms_sym_address, kallsyms_expand_symbol (v6.1, v7.2).
    """
    budget = _Budget(2 * _MAX_SYMBOLS)
    for segment in vmlinux.segments:
        data = bytes(segment.data)
        for tokens in _token_tables(data):
            names = _find_packed_names(data, tokens, budget) or _find_names(data, tokens, budget)
            addresses = names and (
                _find_addresses(vmlinux, data, tokens, names)
                or _find_relative_to_entries(vmlinux, segment, data, tokens, names)
            )
            if names and addresses:
                return [
                    Symbol(name[1:].decode("utf-8", "replace"), address, chr(name[0]))
                    for name, address in zip(names.names, addresses, strict=True)
                ]
    return []


def _token_tables(data: bytes) -> Iterator[_Tokens]:
    """Yield the possible token tables of `data`.

    A possible table contains the ten digits in order, and the index of its tokens follows.
    """
    digits = 0
    for _ in range(_MAX_TABLES):
        # A regular expression would search for ten times as long.
        digits = data.find(_DIGITS, digits) + 1
        if not digits:
            return
        first, last = _starts(data, digits)
        for start in range(last - last % _PACKED, first - 1, -_PACKED):
            tokens = _tokens_at(data, start)
            if tokens:
                yield tokens
                break


def _starts(data: bytes, digits: int) -> tuple[int, int]:
    """Return the first and the last offset at which a token table may start; (0, -1) for none.

    `digits`: offset of the token for "0". This token must be token 48 of the table, because 48 is the code of
    "0". So 48 tokens, each with a zero byte at its end, must precede it.
    """
    least = max(digits - _TOKEN_TABLE_LIMIT + 1, 0)
    last = digits
    for _ in range(_FIRST_DIGIT):
        last = data.rfind(b"\0", least, last)
        if last < 0:
            return 0, -1
    return max(data.rfind(b"\0", least, last) + 1, least), last


def _tokens_at(data: bytes, start: int) -> _Tokens | None:
    """Return the kallsyms token table at the offset `start`, or None if no such table is at this offset.

    The index of the table's tokens (kallsyms_token_index) must follow the table.
    """
    texts = tuple(data[start : start + _TOKEN_TABLE_LIMIT].split(b"\0", _TOKENS)[:_TOKENS])
    if len(texts) < _TOKENS:
        return None
    offsets = [0]
    for text in texts:
        offsets.append(offsets[-1] + len(text) + 1)
    expected = struct.pack(f"<{_TOKENS}H", *(offset & 0xFFFF for offset in offsets[:-1]))
    end = start + offsets[-1]
    for at in (_aligned(end), _aligned(end, _PACKED), end):
        if data.startswith(expected, at):
            return _Tokens(start, at + len(expected), texts)
    return None


def _find_packed_names(data: bytes, tokens: _Tokens, budget: _Budget) -> _Names | None:
    """Find num_syms and the names in the layout since v7.0.

    Return None if no word can be num_syms, or if `budget` is used up.

    In this layout, the token table directly follows the markers. num_syms must match the number of markers,
    of which there is one for each 256 names. The last marker tells how far before the markers num_syms can
    be. `budget` is reduced by the number of decoded names.
    """
    first = max(0, tokens.start - _NAMES_LIMIT)
    first += -first % _PACKED
    words = memoryview(data)[first : tokens.start].cast("I")
    markers = len(words) - 1
    most = max(len(words) - _MAX_SYMBOLS // _MARKED, 0)
    while markers > most and words[markers] > words[markers - 1]:
        markers -= 1
    if markers < 0 or words[markers]:
        return None
    count = len(words) - markers
    last = words[-1]
    nearest = markers - 1 - last // _PACKED
    for index in range(nearest, max(nearest - _MARKED * _LONGEST // _PACKED, -1), -1):
        if budget.names <= 0:
            return None
        if -(-words[index] // _MARKED) == count:
            start = first + index * _PACKED
            names = _names_at(data, start + _PACKED, words[index], tokens, budget, _PACKED)
            if names:
                return _Names(start, names)
    return None


def _find_names(data: bytes, tokens: _Tokens, budget: _Budget) -> _Names | None:
    """Find num_syms and the names in the layouts before v7.0.

    Return None if no word can be num_syms, or if `budget` is used up.

    num_syms and the names precede the token table. `budget` is reduced by the number of decoded names.
    """
    first = max(0, tokens.start - _NAMES_LIMIT)
    first += -first % _ALIGNMENT
    end = tokens.start - tokens.start % _ALIGNMENT
    words = memoryview(data)[first:end].cast("I")
    for index in _before_zeros(words):
        count = words[index]
        if budget.names <= 0:
            return None
        if not 0 < count <= _MAX_SYMBOLS or count * 2 > (len(words) - index) * 4:
            continue
        start = first + index * 4
        names = _names_at(data, start + _ALIGNMENT, count, tokens, budget, _ALIGNMENT)
        if names:
            return _Names(start, names)
    return None


def _before_zeros(words: memoryview) -> Iterator[int]:
    """Yield the even indices of `words` whose next word is zero, in descending order."""
    following = words[1::2].tobytes()
    at = len(following)
    while (at := following.rfind(bytes(4), 0, at)) >= 0:
        if not at % 4:
            yield at // 2
        # The next zeros may begin one byte before these.
        at += 3


def _names_at(
    data: bytes, start: int, count: int, tokens: _Tokens, budget: _Budget, alignment: int
) -> list[bytes] | None:
    """Return the `count` names that begin at offset `start`; None if a name or a marker is invalid.

    `tokens`: the token table. `budget` is reduced by the number of decoded names. `alignment`: alignment in
    bytes of the markers, which follow the names.
    """
    texts = tokens.texts
    limit = tokens.start
    names = []
    markers = []
    at = start
    join = b"".join
    for number in range(count):
        if not number % _MARKED:
            markers.append(at - start)
        length = data[at]
        at += 1
        if length & 0x80:
            # Since v6.1 a name's length can take two bytes.
            length = length & 0x7F | data[at] << 7
            at += 1
        if not length or at + length > limit:
            break
        name = join([texts[token] for token in data[at : at + length]])
        if name[:1] not in _TYPES or len(name) < 2:
            break
        names.append(name)
        at += length
    budget.names -= len(names) + 1
    if len(names) < count:
        return None
    expected = struct.pack(f"<{len(markers)}I", *markers)
    after = _aligned(at, alignment)
    return names if data.startswith(expected, after) and after + len(expected) <= limit else None


def _find_addresses(vmlinux: LinkedMemory, data: bytes, tokens: _Tokens, names: _Names) -> list[int] | None:
    """Return the symbols' addresses, which are before num_syms (up to v6.3) or after the token index.

    Return None if there are no addresses at either location. The right layout is the one that results in
    ascending addresses.
    """
    count = len(names.names)
    offsets_size = _aligned(4 * count)
    after_index = _aligned(tokens.end)
    for offsets, base in (
        (names.start - 8 - offsets_size, names.start - 8),
        (after_index, after_index + offsets_size),
    ):
        if offsets >= 0 and base + 8 <= len(data):
            start = struct.unpack_from("<Q", data, base)[0]
            found = vmlinux.has(start) and _relative(data, offsets, count, start)
            if found:
                return found
    for absolute in (names.start - 8 * count, after_index):
        if absolute >= 0 and absolute + 8 * count <= len(data):
            addresses = list(struct.unpack_from(f"<{count}Q", data, absolute))
            middle = addresses[count // 2]
            if _ascend(addresses) and (vmlinux.has(middle) or vmlinux.has(addresses[-1])):
                return addresses
    return None


def _find_relative_to_entries(
    vmlinux: LinkedMemory, segment: LoadSegment, data: bytes, tokens: _Tokens, names: _Names
) -> list[int] | None:
    """Return the symbols' addresses if each is stored as an offset from its own entry; otherwise None.

    `data`: contents of `segment`, in which `tokens` and `names` were found.
    """
    count = len(names.names)
    start = _aligned(tokens.end, _PACKED)
    if start + _PACKED * count > len(data):
        return None
    offsets = struct.unpack_from(f"<{count}i", data, start)
    entries = range(segment.va + start, segment.va + start + _PACKED * count, _PACKED)
    addresses = [entry + offset for entry, offset in zip(entries, offsets, strict=True)]
    return addresses if _ascend(addresses) and vmlinux.has(addresses[count // 2]) else None


def _relative(data: bytes, offsets: int, count: int, base: int) -> list[int] | None:
    """Decode `count` addresses that are stored as offsets; return None if the addresses don't ascend.

    `offsets`: where the stored offsets begin in `data`. Either all stored offsets are relative to `base`, or
    only the negative ones are; the others are then absolute addresses.
    """
    signed = struct.unpack_from(f"<{count}i", data, offsets)
    for addresses in (
        [offset if offset >= 0 else base - 1 - offset for offset in signed],
        [base + (offset & 0xFFFFFFFF) for offset in signed],
    ):
        # Non-negative offsets could all be absolute, but no kernel has only per-CPU variables.
        if _ascend(addresses) and addresses[-1] >= base:
            return addresses
    return None


def _ascend(addresses: list[int]) -> bool:
    return all(low <= high for low, high in pairwise(addresses)) and any(addresses)


def _aligned(offset: int, alignment: int = _ALIGNMENT) -> int:
    return -(-offset // alignment) * alignment
