"""Searches of machine code for bytes that lead into a window, without a look at each instruction."""

from __future__ import annotations

from collections.abc import Iterator

_FIELD = 4
"""Size in bytes of a displacement."""
_HALF = 16
_LOWER = (1 << _HALF) - 1


def positions(data: bytes, pattern: bytes, start: int, stop: int) -> Iterator[int]:
    """Iterate over the positions of `pattern` within `data[start:stop]`, which may overlap."""
    find = data.find
    at = find(pattern, start, stop)
    while at >= 0:
        yield at
        at = find(pattern, at + 1, stop)


def displacements_into(code: bytes, window: range) -> Iterator[tuple[int, int]]:
    """Iterate over all four bytes of `code` that are the distance from their own offset into `window`.

    `window` contains offsets in `code`, which may be negative or after its end. Yields the offset of the four
    bytes, and the offset to which they lead.

    Displacements with the same upper half lie within 64 KiB and the size of the window. So the code is
    searched for each upper half in turn, and hardly more than once.
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
