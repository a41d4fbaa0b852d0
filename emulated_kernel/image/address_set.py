"""AddressSet: sorted addresses in an array, which may lie in a file: a tenth of what a set takes."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Self


class AddressSet(Set[int]):
    """Eight bytes an address; never changed."""

    __slots__ = ("in_order",)

    def __init__(self, addresses: Iterable[int] = ()) -> None:
        self.in_order: Sequence[int] = (
            addresses.in_order if isinstance(addresses, AddressSet) else array("Q", sorted(set(addresses)))
        )
        """Ascending; never changed."""

    @classmethod
    def of_part(cls, part: memoryview) -> Self:
        """What `array("Q", in_order)` has in memory, where it stays. Raises: TypeError."""
        found = cls()
        found.in_order = part.cast("Q")
        return found

    def __contains__(self, address: object) -> bool:
        if not isinstance(address, int):
            return False
        addresses = self.in_order
        at = bisect_left(addresses, address)
        return at < len(addresses) and addresses[at] == address

    def __iter__(self) -> Iterator[int]:
        return iter(self.in_order)

    def __len__(self) -> int:
        return len(self.in_order)

    def between(self, start: int, end: int) -> Sequence[int]:
        """Those from `start` on, below `end`, ascending."""
        addresses = self.in_order
        first = bisect_left(addresses, start)
        return addresses[first : bisect_left(addresses, end, first)]
