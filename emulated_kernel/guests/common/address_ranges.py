"""AddressRanges: finds the range that contains an address."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class AddressRanges:
    """A sorted, non-empty sequence of address ranges [start, end)."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self._ordered = sorted(spans)
        self._starts = [start for start, _ in self._ordered]
        self.first = self._starts[0]
        self.last = max(end for _, end in self._ordered)

    def around(self, address: int) -> tuple[int, int] | None:
        """Return the range (start, end) that contains `address`, or None if no range contains it."""
        if not self.first <= address < self.last:
            return None
        start, end = self._ordered[bisect_right(self._starts, address) - 1]
        return (start, end) if start <= address < end else None
