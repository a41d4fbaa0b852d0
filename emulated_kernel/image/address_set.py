"""AddressSet: an immutable set of addresses in a sorted array, which takes a tenth of a set's memory."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Self


class AddressSet(Set[int]):
    """An immutable set of addresses, in an array of 8 bytes each, which can be mapped from a file."""

    __slots__ = ("in_order",)

    def __init__(self, addresses: Iterable[int] = ()) -> None:
        self.in_order: Sequence[int] = (
            addresses.in_order if isinstance(addresses, AddressSet) else array("Q", sorted(set(addresses)))
        )
        """The addresses of the set in ascending order."""

    @classmethod
    def of_part(cls, part: memoryview) -> Self:
        """Return the set of the addresses in `part`, without a copy.

        `part` is an array of 8 bytes for each address, in ascending order.
        Raises: TypeError (the size of `part` is not a multiple of 8).
        """
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
        """Return the addresses from `start` up to, but not including, `end`, in ascending order."""
        addresses = self.in_order
        first = bisect_left(addresses, start)
        return addresses[first : bisect_left(addresses, end, first)]
