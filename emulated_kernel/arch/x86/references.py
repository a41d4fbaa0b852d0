"""Possible references from x86 code: bit patterns that look like a direct branch or take an address."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache

from emulated_kernel.arch.analysis.xrefs import Reference, positions

_BRANCH = re.compile(rb"(?s)(?=([\x70-\x7f\xe0-\xe3\xeb].|[\xe8\xe9]....|\x0f[\x80-\x8f]....))")
_SHORT_BRANCH = re.compile(rb"(?s)(?=([\x70-\x7f\xe0-\xe3\xeb].))")
_SHORT_SIZE = 2
"""Size in bytes of a branch with a displacement of one byte."""
_LEA = re.compile(rb"(?s)(?=(\x8d[\x05\x0d\x15\x1d\x25\x2d\x35\x3d]....))")
_HALF = 16
"""Number of bits of the upper half of a displacement or immediate, whose bytes a search looks for."""
_LOWER = (1 << _HALF) - 1


def branches(addr: int, code: bytes) -> Iterator[Reference]:
    """Iterate over (target, source) of all bit patterns in the code at `addr` that look like direct branches.

    Decoding the whole kernel would take ten times as long, and few of the branches matter.
    """
    return _relative(addr, code, _BRANCH)


def branches_into(window: range, addr: int, code: bytes) -> Iterator[Reference]:
    """Iterate over those of branches() whose target is in `window`; takes 2 % of the time."""
    first = max(window.start - addr - _SHORT_SIZE - 0x7F, 0)
    last = max(window.stop - addr + 0x80, 0)
    for target, source in _relative(addr, code, _SHORT_BRANCH, first, last):
        if target in window:
            yield target, source
    for target, at in _displacements(window, addr, code):
        if at >= 1 and code[at - 1] & 0xFE == 0xE8:
            yield target, addr + at - 1
        elif at >= 2 and code[at - 2] == 0x0F and code[at - 1] & 0xF0 == 0x80:
            yield target, addr + at - 2


def rip_relative(addr: int, code: bytes) -> Iterator[Reference]:
    """Iterate over (target, source) of bit patterns in the code at `addr` that look like RIP-relative lea."""
    return _relative(addr, code, _LEA)


def rip_relative_into(window: range, addr: int, code: bytes) -> Iterator[Reference]:
    """Iterate over those of rip_relative() whose target is in `window`."""
    for target, at in _displacements(window, addr, code):
        if at >= 2 and code[at - 2] == 0x8D and code[at - 1] & 0xC7 == 0x05:
            yield target, addr + at - 2


def immediates(sign: int, text: Iterable[tuple[int, int]], addr: int, code: bytes) -> Iterator[Reference]:
    """Iterate over (value, address) of all four bytes in the code at `addr` that may be an address of `text`.

    `text`: ranges of addresses, of which only the upper bytes are compared. `sign`: upper bits of the values.
    """
    uppers = frozenset(
        upper & 0xFF for start, end in text for upper in range(start >> 24, (end - 1 >> 24) + 1)
    )
    for match in _with_upper(uppers).finditer(code):
        yield sign | int.from_bytes(match[1], "little"), addr + match.start()


def immediates_into(sign: int, window: range, addr: int, code: bytes) -> Iterator[Reference]:
    """Iterate over those of immediates() whose value is in `window`."""
    for upper in range(window.start >> _HALF, (window.stop - 1 >> _HALF) + 1):
        for at in positions(code, (upper & _LOWER).to_bytes(2, "little"), 2, len(code)):
            value = sign | int.from_bytes(code[at - 2 : at + 2], "little")
            if value in window:
                yield value, addr + at - 2


def _relative(
    addr: int, code: bytes, pattern: re.Pattern[bytes], first: int = 0, last: int | None = None
) -> Iterator[Reference]:
    """Iterate over (target, source) of the instructions that `pattern` finds in `code[first:last]`."""
    from_bytes = int.from_bytes
    for match in pattern.finditer(code, first, len(code) if last is None else last):
        insn = match[1]
        source = addr + match.start()
        displacement = insn[1:] if len(insn) == _SHORT_SIZE else insn[-4:]
        yield source + len(insn) + from_bytes(displacement, "little", signed=True), source


def _displacements(window: range, addr: int, code: bytes) -> Iterator[Reference]:
    """Iterate over all four bytes that lead into `window` if they are an instruction's displacement.

    Yields the target and the offset of the four bytes in the code at `addr`.

    Bytes whose displacements have the same upper half lie within 64 KiB and the size of the window. So the
    code is searched for each upper half in turn, and read only little more than once.
    """
    size = 4
    from_bytes = int.from_bytes
    # Offset of a displacement of 0 that leads to the window's start; the same for its last address.
    start = window.start - addr - size
    last = window.stop - 1 - addr - size
    for upper in range(start - len(code) >> _HALF, (last >> _HALF) + 1):
        lowest = start - (upper << _HALF) - _LOWER
        highest = last - (upper << _HALF)
        if highest < 0:
            continue
        pattern = (upper & _LOWER).to_bytes(2, "little")
        for at in positions(code, pattern, max(lowest, 0) + 2, highest + size):
            field = at - 2
            target = addr + field + size + from_bytes(code[field : field + size], "little", signed=True)
            if target in window:
                yield target, field


@cache
def _with_upper(uppers: frozenset[int]) -> re.Pattern[bytes]:
    """Return a regular expression that finds four bytes of which the last is one of `uppers`."""
    return re.compile(b"(?s)(?=(...[%s]))" % b"".join(re.escape(bytes((upper,))) for upper in sorted(uppers)))
