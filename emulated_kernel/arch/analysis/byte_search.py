"""Searches machine code for byte strings, and for displacements to a range of offsets.

The searches use bytes.find(), because decoding all instructions would take longer.
"""

from __future__ import annotations

from collections.abc import Iterator

_FIELD = 4
"""Size in bytes of the displacements that displacements_into() finds."""
_HALF = 16
_LOWER = (1 << _HALF) - 1


def positions(data: bytes, pattern: bytes, start: int, stop: int) -> Iterator[int]:
    """Yield the offset in `data` of each occurrence of `pattern` that lies completely in `data[start:stop]`.

    Occurrences of the pattern may overlap.
    """
    find = data.find
    at = find(pattern, start, stop)
    while at >= 0:
        yield at
        at = find(pattern, at + 1, stop)


def displacements_into(code: bytes, window: range) -> Iterator[tuple[int, int]]:
    """Yield (offset, sum) for each 32-bit word of `code` that may be a displacement into `window`.

    The sum is the word's value, as a signed number, plus the word's offset; it is in `window`. A word may
    start at any byte. `window`: range of offsets in `code`, which may be negative or after the end of `code`.
    """
    from_bytes = int.from_bytes
    first = window.start
    last = window.stop - 1
    for upper in range(first - len(code) >> _HALF, (last >> _HALF) + 1):
        lowest = max(first - (upper << _HALF) - _LOWER, 0)
        highest = last - (upper << _HALF)
        if highest < 0:
            continue
        pattern = (upper & _LOWER).to_bytes(2, "little")
        for at in positions(code, pattern, lowest + 2, highest + _FIELD):
            field = at - 2
            target = field + from_bytes(code[field : field + _FIELD], "little", signed=True)
            if target in window:
                yield field, target
