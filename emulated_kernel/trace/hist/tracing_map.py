"""The map of a histogram: key -> element with sums and variables."""

from __future__ import annotations

import errno
from collections.abc import Callable, Generator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TypeVar

from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.limits import Limit, Limits, MemoryBudget

DEFAULT_BITS = 11
MIN_BITS = 7
MAX_BITS = 17
KEYS_MAX = 3
VALS_MAX = 3
VARS_MAX = 16
SORT_KEYS_MAX = 2
SORT_STEP = 1024
"""Number of elements that are sorted in one step of a read; other requests are served after each step."""
U64 = (1 << 64) - 1

HIST_SIZE = 16384
"""Size in bytes of the host memory that a histogram without elements occupies."""
ELEMENT_SIZE = 300
"""Size in bytes of the host memory of an element, without its key, sums and variables."""
SUM_SIZE = 40
VARIABLES_SIZE = 232
VARIABLE_SIZE = 320
"""Size in bytes of the host memory of a variable, whose value may be a string of 256 characters."""
T = TypeVar("T")
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

    `index` is the field's index in HistData.sortable. If `descending` is False, the order is ascending.
    """

    index: int = 0
    descending: bool = False


Rank = Callable[[Element], int]
"""Function that returns the number by which an element is ordered."""


class TracingMap:
    """The map of a histogram: key -> element. Mirrors: kernel/trace/tracing_map.c (v6.1)."""

    def __init__(self, bits: int, key_size: int, sums: int, memory: MemoryBudget | None = None) -> None:
        """Create an empty map for at most 2**bits elements.

        `key_size`: size of a key in bytes. `sums`: number of sums in each element. `memory`: the budget to
        which the map and its elements are charged. If it is None, the map gets a budget of its own.
        """
        self._memory = memory or MemoryBudget(Limits(), Limit.HIST_BYTES, Limit.USER_HIST_BYTES)
        self._user = self._memory.user()
        self._charged = 0
        """Number of bytes that the map has charged to the budget."""
        self.bits = bits
        self.key_size = key_size
        self._own_charge = 0
        """Number of bytes of `_charged` that stay charged when the map is cleared."""
        self.hits = 0
        self.drops = 0
        self.variable_count = 0
        self._sums = sums
        self._elements: dict[bytes, Element] = {}

    def add_variable(self) -> int:
        """Reserve room for a variable, and return its index.

        Raises: KernelError EINVAL (there are 16 already).
        """
        if self.variable_count == VARS_MAX:
            raise KernelError(errno.EINVAL, f"histogram: more than {VARS_MAX} variables")
        self.variable_count += 1
        return self.variable_count - 1

    def insert(self, key: bytes, comm: bytes) -> Element | None:
        """Count a hit of `key`, and return the key's element, which is created if there is none.

        `comm`: name of the current task, for a new element. If the map is full, or the budget has no room for
        a new element, count a drop instead, and return None.
        """
        element = self._elements.get(key)
        if element is None:
            if len(self._elements) >= 1 << self.bits or not self._charge(self._element_size):
                self.drops += 1
                return None
            element = Element(key, self._sums, comm)
            self._elements[key] = element
        self.hits += 1
        return element

    def lookup(self, key: bytes) -> Element | None:
        """Return the element of a key, or None if the key has no element.

        The key is truncated, or padded with zeros, to the map's key size.
        """
        return self._elements.get(key[: self.key_size].ljust(self.key_size, b"\0"))

    def clear(self) -> None:
        """Remove all elements, and set the counts of hits and drops to 0."""
        self._elements.clear()
        self.hits = 0
        self.drops = 0
        self._memory.give_back(self._charged - self._own_charge, self._user)
        self._charged = self._own_charge

    @property
    def _element_size(self) -> int:
        """Maximum size in bytes of the host memory of an element."""
        variables = VARIABLES_SIZE + self.variable_count * VARIABLE_SIZE if self.variable_count else 0
        return ELEMENT_SIZE + self.key_size + self._sums * SUM_SIZE + variables

    def _charge(self, size: int) -> bool:
        """Charge `size` bytes to the budget, and return True.

        If the budget has no room, charge nothing and return False.
        """
        if not self._memory.take(size, self._user):
            return False
        self._charged += size
        return True

    def allocate(self) -> None:
        """Charge the size of the empty map to the budget.

        Raises: KernelError ENOMEM (the budget has no room).
        """
        if not self._charge(HIST_SIZE):
            raise KernelError(
                errno.ENOMEM, "histogram: hist_bytes or user_hist_bytes is reached; remove others"
            )
        self._own_charge = HIST_SIZE

    def release(self) -> None:
        """Give all charged bytes back to the budget. No hit may be counted in the map afterwards."""
        self._memory.give_back(self._charged, self._user)
        self._charged = 0
        self._own_charge = 0

    def sorted(self, primary: Rank, *secondary: Rank) -> Generator[None, None, list[Element]]:
        """Sort all elements in ascending order of the numbers that `primary` returns for them.

        `secondary`: at most one function; elements with equal numbers are sorted by the numbers that it
        returns.

        Before the sort, all elements are in the byte order of their keys. The sort is Linux's heap sort,
        which is not stable, so elements that are equal in all numbers have the same order as in Linux.
        The generator yields after each SORT_STEP elements, and its return value is the sorted list. Hits may
        add elements while the generator is suspended; the list does not contain them. The numbers for a sort
        are computed before it starts, so later changes of an element do not affect this sort.
        """
        elements = sorted(self._elements.values(), key=lambda each: each.key)
        ranks = [primary(each) for each in elements]
        elements, ranks = yield from heap_sort(elements, ranks)
        for rank in secondary:
            runs = groupby(zip(ranks, elements, strict=True), itemgetter(0))
            elements = []
            for run in [[each for _, each in run] for _, run in runs]:
                ordered, _ = yield from heap_sort(run, [rank(each) for each in run])
                elements += ordered
        return elements


def heap_sort(
    elements: Sequence[T], ranks: Sequence[int]
) -> Generator[None, None, tuple[list[T], list[int]]]:
    """Sort elements in ascending order of their ranks, and equal elements in the order of Linux's sort().

    `ranks`: the rank of each element, in the order of `elements`. The generator yields after each SORT_STEP
    elements. Its return value is the sorted elements and their ranks.
    Mirrors: lib/sort.c:sort (v6.1).
    """
    keys = [*ranks]
    order = [*range(len(keys))]
    for start in reversed(range(len(keys) // 2)):
        _sift_down(keys, order, start, len(keys))
        if not start % SORT_STEP:
            yield
    for end in reversed(range(1, len(keys))):
        keys[0], keys[end] = keys[end], keys[0]
        order[0], order[end] = order[end], order[0]
        _sift_down(keys, order, 0, end)
        if not end % SORT_STEP:
            yield
    return [elements[index] for index in order], keys


def _sift_down(keys: list[int], order: list[int], start: int, end: int) -> None:
    """Move the element at the index `start` down in the heap to its position.

    The heap consists of the items before the index `end`. `keys`: ranks in heap order. `order`: original
    index of each rank's element, which moves together with the rank.
    As in Linux, the search follows the greater child to a leaf and then goes back up to the position. This
    determines the order of equal elements.
    """
    path = []
    at = start
    last = end - 2
    while (left := 2 * at + 1) < last + 1:
        at = left if keys[left] >= keys[left + 1] else left + 1
        path.append(at)
    if left == last + 1:
        at = left
        path.append(at)
    moved = keys[start]
    number = order[start]
    while path and moved >= keys[path[-1]]:
        path.pop()
    at = start
    for child in path:
        keys[at] = keys[child]
        order[at] = order[child]
        at = child
    keys[at] = moved
    order[at] = number
