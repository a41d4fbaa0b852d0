"""The map of a histogram: key -> element with sums and variables."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from itertools import groupby

from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass

DEFAULT_BITS = 11
MIN_BITS = 7
MAX_BITS = 17
KEYS_MAX = 3
VALS_MAX = 3
VARS_MAX = 16
SORT_KEYS_MAX = 2
U64 = (1 << 64) - 1

Value = int | bytes
"""Value of a field: a number below 2**64, or a string without its NUL."""


class Element:
    """An entry of a histogram's map, for one key.

    Mirrors: kernel/trace/tracing_map.h:struct tracing_map_elt (v6.1).
    """

    __slots__ = ("comm", "key", "sums", "variables")

    def __init__(self, key: bytes, sums: int, comm: bytes) -> None:
        self.key = key
        self.sums = [0] * sums
        self.variables: dict[int, Value] = {}
        """Index of the variable (HistField.index) -> value, for the variables that are set."""
        self.comm = comm
        """Name of the task that created the element."""


@dataclass(frozen=True)
class SortKey:
    """A sort key: a field of the histogram, and the direction.

    `index` is the field's index in HistData.sortable.
    """

    index: int = 0
    descending: bool = False


Rank = Callable[[Element], int]
"""Function that returns the number by which an element is sorted."""


class TracingMap:
    """The map of a histogram: key -> element. Mirrors: kernel/trace/tracing_map.c (v6.1)."""

    def __init__(self, bits: int, key_size: int, sums: int) -> None:
        self.bits = bits
        self.key_size = key_size
        self.hits = 0
        self.drops = 0
        self.variable_count = 0
        self._sums = sums
        self._elements: dict[bytes, Element] = {}

    def add_variable(self) -> int:
        """Return the index of a new variable. Raises: KernelError EINVAL (there are 16 already)."""
        if self.variable_count == VARS_MAX:
            raise KernelError(errno.EINVAL, f"histogram: more than {VARS_MAX} variables")
        self.variable_count += 1
        return self.variable_count - 1

    def insert(self, key: bytes, comm: bytes) -> Element | None:
        """Return the element of a key and count a hit; create the element if necessary.

        If the map is full, count a drop and return None.
        """
        element = self._elements.get(key)
        if element is None:
            if len(self._elements) >= 1 << self.bits:
                self.drops += 1
                return None
            element = Element(key, self._sums, comm)
            self._elements[key] = element
        self.hits += 1
        return element

    def lookup(self, key: bytes) -> Element | None:
        """Return the element of a key, or None if there is none.

        The key is truncated, or padded with zeros, to the map's key size.
        """
        return self._elements.get(key[: self.key_size].ljust(self.key_size, b"\0"))

    def clear(self) -> None:
        """Remove all elements, and set all counts to 0."""
        self._elements.clear()
        self.hits = 0
        self.drops = 0

    def sorted(self, primary: Rank, *secondary: Rank) -> list[Element]:
        """Return all elements, sorted by `primary` and, where that is equal, by `secondary`.

        Linux: equal elements have the order that a heap sort gives to elements in the byte order of their
        keys.
        """
        elements = heap_sort(sorted(self._elements.values(), key=lambda each: each.key), primary)
        for rank in secondary:
            runs = groupby(elements, primary)
            elements = [each for _, run in runs for each in heap_sort(run, rank)]
        return elements


def heap_sort(elements: Iterable[Element], rank: Rank) -> list[Element]:
    """Sort elements by a heap sort that orders equal elements as Linux's sort() does.

    Mirrors: lib/sort.c:sort (v6.1)
    """
    heap = list(elements)
    for start in reversed(range(len(heap) // 2)):
        _sift_down(heap, start, len(heap), rank)
    for end in reversed(range(1, len(heap))):
        heap[0], heap[end] = heap[end], heap[0]
        _sift_down(heap, 0, end, rank)
    return heap


def _sift_down(heap: list[Element], start: int, end: int, rank: Rank) -> None:
    """Move the element at `start` down in the heap to its position.

    Follow the greater child to a leaf, and then go back up to the position.
    """
    at = start
    while 2 * at + 2 < end:
        left = 2 * at + 1
        at = left if rank(heap[left]) >= rank(heap[left + 1]) else left + 1
    if 2 * at + 2 == end:
        at = 2 * at + 1
    while at != start and rank(heap[start]) >= rank(heap[at]):
        at = (at - 1) // 2
    moved = heap[start]
    path = []
    while at != start:
        path.append(at)
        at = (at - 1) // 2
    for child in reversed(path):
        heap[at], at = heap[child], child
    heap[at] = moved
