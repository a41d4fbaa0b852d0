"""Tables of addresses in arrays, which can be mapped from a file, and need a tenth of a Python set's memory.

AddressSet is an immutable set of addresses, and EntryTable a table whose entries consist of addresses.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import starmap
from typing import Self, TypeVar, overload

Entry = TypeVar("Entry", bound=tuple[int, ...])


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


class EntryTable(Sequence[Entry]):
    """A table whose entries all consist of the same number of addresses, sorted by their first address.

    Each access to an entry makes a new object for it.
    """

    def __init__(self, part: memoryview, width: int, entry: Callable[..., Entry]) -> None:
        """Create the table whose entries are in the array `part`, which has 8 bytes for each address.

        `width`: number of addresses in an entry. `entry` is called with the addresses of an entry, and
        returns the entry.
        Raises: TypeError, ValueError (the size of `part` is wrong).
        """
        self._words = part.cast("Q")
        self._width = width
        self._entry = entry
        if len(self._words) % width:
            raise ValueError("table: its last entry is incomplete")

    @property
    def firsts(self) -> Sequence[int]:
        """The first address of each entry, in ascending order."""
        return self._words[:: self._width]

    def __len__(self) -> int:
        return len(self._words) // self._width

    @overload
    def __getitem__(self, at: int, /) -> Entry: ...
    @overload
    def __getitem__(self, at: slice, /) -> Sequence[Entry]: ...
    def __getitem__(self, at: int | slice, /) -> Entry | Sequence[Entry]:
        if isinstance(at, slice):
            return tuple(self)[at]
        first = range(len(self))[at] * self._width
        return self._entry(*self._words[first : first + self._width])

    def __iter__(self) -> Iterator[Entry]:
        words = iter(self._words)
        return starmap(self._entry, zip(*[words] * self._width, strict=True))


def firsts_in_order(entries: Iterable[tuple[int, *tuple[object, ...]]]) -> Sequence[int]:
    """Return the first address of each of the `entries`, in ascending order."""
    return entries.firsts if isinstance(entries, EntryTable) else sorted([entry[0] for entry in entries])


def in_order(addresses: Iterable[int]) -> Sequence[int]:
    """Return `addresses` in ascending order. The addresses of an AddressSet are not copied."""
    return addresses.in_order if isinstance(addresses, AddressSet) else sorted(addresses)
