"""Possible references from x86 code: bit patterns that look like a direct branch or take an address."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from struct import Struct

from emulated_kernel.arch.analysis.byte_search import displacements_into, positions
from emulated_kernel.arch.analysis.xrefs import Reference
from emulated_kernel.util.lazy_pattern import lazy_pattern

_SHORT_BRANCH = lazy_pattern(rb"[\x70-\x7f\xe0-\xe3\xeb]")
_CALL_OR_JUMP = lazy_pattern(rb"[\xe8\xe9]")
_CONDITIONAL = lazy_pattern(rb"\x0f(?=[\x80-\x8f])")
_SHORT_SIZE = 2
"""Size in bytes of a branch with a displacement of one byte."""
_LEA = lazy_pattern(rb"\x8d(?=[\x05\x0d\x15\x1d\x25\x2d\x35\x3d])")
_DISPLACEMENT = Struct("<i")
_DISPLACEMENT_SIZE = _DISPLACEMENT.size


def branches(addr: int, code: bytes) -> Iterator[Reference]:
    """Yield (target, source) for each bit pattern in the code at `addr` that looks like a direct branch.

    Patterns may start in the middle of an instruction. Decoding all instructions of a kernel would take ten
    times as long, and few of the branches matter.
    """
    yield from _short_branches(addr, code, 0, len(code))
    yield from _relative(addr, code, _CALL_OR_JUMP, 1)
    yield from _relative(addr, code, _CONDITIONAL, 2)


def branches_into(window: range, addr: int, code: bytes) -> Iterator[Reference]:
    """Yield those items of branches() whose target is in `window`.

    The search takes 7 % of the time that branches() takes.
    """
    first = max(window.start - addr - _SHORT_SIZE - 0x7F, 0)
    last = max(window.stop - addr + 0x80, 0)
    for target, source in _short_branches(addr, code, first, last):
        if target in window:
            yield target, source
    for at, target in _displacements(window, addr, code):
        if at >= 1 and code[at - 1] & 0xFE == 0xE8:
            yield target, addr + at - 1
        elif at >= 2 and code[at - 2] == 0x0F and code[at - 1] & 0xF0 == 0x80:
            yield target, addr + at - 2


def rip_relative(addr: int, code: bytes) -> Iterator[Reference]:
    """Yield (target, source) for bit patterns in the code at `addr` that look like a RIP-relative lea."""
    return _relative(addr, code, _LEA, 2)


def rip_relative_into(window: range, addr: int, code: bytes) -> Iterator[Reference]:
    """Yield those items of rip_relative() whose target is in `window`.

    The function filters the items of rip_relative(), because a kernel has few of them. A search for
    displacements into the window would take four times as long.
    """
    return (way for way in rip_relative(addr, code) if way[0] in window)


def immediates(sign: int, text: Iterable[tuple[int, int]], addr: int, code: bytes) -> Iterator[Reference]:
    """Yield (value, address) of each 32-bit word in the code at `addr` that may be an address in `text`.

    A word may start at any byte. A word is yielded if its upper byte equals bits 24 to 31 of an address in
    one of the ranges `text`. `sign`: bits 32 to 63 of each yielded value, in place; its bits 0 to 31 are 0.
    """
    uppers = frozenset(
        upper & 0xFF for start, end in text for upper in range(start >> 24, (end - 1 >> 24) + 1)
    )
    for match in _with_upper(uppers).finditer(code):
        yield sign | int.from_bytes(match[1], "little"), addr + match.start()


def immediates_into(sign: int, window: range, addr: int, code: bytes) -> Iterator[Reference]:
    """Yield those items of immediates() whose value is in `window`; `sign`: as for immediates()."""
    for upper in range(window.start >> 16, (window.stop - 1 >> 16) + 1):
        for at in positions(code, (upper & 0xFFFF).to_bytes(2, "little"), 2, len(code)):
            value = sign | int.from_bytes(code[at - 2 : at + 2], "little")
            if value in window:
                yield value, addr + at - 2


def _short_branches(addr: int, code: bytes, first: int, last: int) -> Iterator[Reference]:
    """Yield (target, source) for each branch in `code[first:last]` whose displacement has one byte.

    `addr`: address of the start of `code`.
    """
    end = min(last, len(code)) - 1
    behind = addr + _SHORT_SIZE
    for match in _SHORT_BRANCH.finditer(code, first, end):
        at = match.start()
        displacement = code[at + 1]
        yield behind + at + (displacement ^ 0x80) - 0x80, addr + at


def _relative(addr: int, code: bytes, pattern: re.Pattern[bytes], opcode: int) -> Iterator[Reference]:
    """Yield (target, source) for each instruction in `code` with an opcode that matches `pattern`.

    `addr`: address of the start of `code`. `opcode`: size of the opcode in bytes; a displacement of four
    bytes follows it.
    """
    displacement_at = _DISPLACEMENT.unpack_from
    behind = addr + opcode + _DISPLACEMENT_SIZE
    for match in pattern.finditer(code, 0, len(code) - _DISPLACEMENT_SIZE):
        at = match.start()
        (displacement,) = displacement_at(code, at + opcode)
        yield behind + at + displacement, addr + at


def _displacements(window: range, addr: int, code: bytes) -> Iterator[tuple[int, int]]:
    """Yield (offset, target) of each 32-bit word in the code at `addr` that may be a displacement.

    The target is the address after the word plus the word's value, and is in `window`. A word may start at
    any byte.
    """
    behind = addr + _DISPLACEMENT_SIZE
    for at, target in displacements_into(code, range(window.start - behind, window.stop - behind)):
        yield at, behind + target


@cache
def _with_upper(uppers: frozenset[int]) -> re.Pattern[bytes]:
    """Return a regular expression that finds all 32-bit words whose upper byte is one of `uppers`.

    Group 1 of a match is the word. A word may start at any byte.
    """
    return re.compile(b"(?s)(?=(...[%s]))" % b"".join(re.escape(bytes((upper,))) for upper in sorted(uppers)))
