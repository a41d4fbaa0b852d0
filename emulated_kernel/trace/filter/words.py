"""FilterWords: the syntax of event filters that only some kernels support: `FIELD.function`, `CPUS{LIST}`."""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.trace.interface import LINUX_6_1, Interface, InterfaceRule
from emulated_kernel.util.fast_dataclass import dataclass, field
from emulated_kernel.util.lazy_pattern import lazy_pattern
from emulated_kernel.util.limits import Limit, Limits, MemoryBudget

_REGION = lazy_pattern(
    r"\s*(?:all|(?P<first>\d+|N)(?:-(?P<last>\d+|N))?)(?::(?P<used>\d+)/(?P<group>\d+))?\s*"
)


def _no_limit() -> MemoryBudget:
    return MemoryBudget(Limits(), None, Limit.USER_DEFINITION_BYTES)


def _no_function(_place: str | int) -> None:
    """Return None for every name and address: no function is known."""


@dataclass(frozen=True, eq=False)
class FilterWords:
    """Features of event filters that later kernels have and Linux 6.1 lacks, and filters' memory budget."""

    interface: Interface = LINUX_6_1
    cpus: int = 1
    """Number of CPUs of the kernel. A filter whose `CPUS{LIST}` names a further CPU is wrong."""
    word_size: int = 8
    """Size of an address in bytes."""
    find_function: Callable[[str | int], range | None] = _no_function
    """Returns the address range of a function; the argument is its name, or an address in the function.

    The result is None if the kernel has no such function.
    """
    memory: MemoryBudget = field(default_factory=_no_limit)
    """Limit of the host memory that all filters, synthetic events and lists of pids of the kernel take."""

    @property
    def has_functions(self) -> bool:
        """Whether filters accept `FIELD.function`, which compares a field with a function."""
        return InterfaceRule.FILTER_FUNCTIONS in self.interface

    @property
    def has_cpus(self) -> bool:
        """Whether filters accept a value `CPUS{LIST}`."""
        return InterfaceRule.FILTER_CPUS in self.interface


NO_WORDS = FilterWords()
"""The features of filters in Linux 6.1: neither `FIELD.function` nor `CPUS{LIST}`."""


def parse_cpus(text: str, cpus: int) -> frozenset[int] | None:
    """Return the CPUs of a list such as `0-2,5`, or None if the list is wrong.

    `cpus`: number of CPUs. A list that names a further CPU is wrong.
    Mirrors: lib/bitmap-str.c:bitmap_parselist (v6.12).
    """
    found: set[int] = set()
    for part in text.split(","):
        if not part.strip():
            continue
        region = _REGION.fullmatch(part)
        if region is None:
            return None
        first = _cpu(region["first"] or "0", cpus)
        last = _cpu(region["last"] or region["first"] or "N", cpus)
        used = int(region["used"] or 1)
        group = int(region["group"] or 1)
        if first > last or last >= cpus or not group or used > group:
            return None
        found.update(cpu for cpu in range(first, last + 1) if (cpu - first) % group < used)
    return frozenset(found)


def _cpu(text: str, cpus: int) -> int:
    return cpus - 1 if text == "N" else int(text)
