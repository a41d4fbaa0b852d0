"""References from outside a function into a region of it: branches, pointers, fixups, jump labels."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.image.kallsyms import Symbol
from emulated_kernel.image.text_tables import ProbedTables

IsInsn = Callable[[Symbol, int], bool]
"""Function (symbol, address) that returns True if an instruction of the function starts at the address."""

PossibleBranches = Callable[[int, bytes], Iterator[tuple[int, int]]]
"""Function that takes an address and the code there, and yields possible direct branches.

It yields (target, source) for each bit pattern that looks like a direct branch. A pattern may start at any
byte, even in the middle of an instruction.
"""


_PART_BITS = 16
_PART_MASK = (1 << _PART_BITS) - 1
_ADDRESSES = 1 << 64
"""Number of 64-bit addresses. Distances between addresses are computed modulo this number."""
_LEAST = -1 << 63
"""Lowest distance between two addresses, as a signed number of 64 bits."""
Ways = tuple["array[int]", "array[int]"]
"""Target offsets within one 64 KiB part of the text, and the distance from each target to its source."""
_NONE: Ways = array("H"), array("q")


class XrefIndex:
    """Index of references, ordered by target.

    Each part of 64 KiB is sorted on first use, since a kernel can have a million references.
    """

    def __init__(self, ways: Iterable[tuple[int, int]], distance: str = "q") -> None:
        """Index `ways`, pairs of target address and source address.

        `distance` is the array type code that can hold the distance between target and source.
        """
        targets: defaultdict[int, array[int]] = defaultdict(lambda: array("H"))
        sources: defaultdict[int, array[int]] = defaultdict(lambda: array(distance))
        for target, source in ways:
            part = target >> _PART_BITS
            targets[part].append(target & _PART_MASK)
            # Modulo 2**64: per-CPU data of a distribution's kernel is linked at address 0.
            sources[part].append((source - target - _LEAST) % _ADDRESSES + _LEAST)
        self._unsorted = {part: (targets[part], sources[part]) for part in targets}
        self._sorted: dict[int, Ways] = {}

    def into(self, region: range) -> list[int]:
        """Return the source addresses of all references into a region, ordered by target."""
        return [source for _, source in self.pairs(region)]

    def pairs(self, region: range) -> list[tuple[int, int]]:
        """Return the target and source address of each reference into a region, ordered by target."""
        found: list[tuple[int, int]] = []
        for part in range(region.start >> _PART_BITS, (region.stop >> _PART_BITS) + 1):
            base = part << _PART_BITS
            targets, sources = self._sorted_part(part)
            first = bisect_left(targets, region.start - base)
            last = bisect_left(targets, region.stop - base)
            ways = zip(targets[first:last], sources[first:last], strict=True)
            found += [(base + target, (base + target + way) % _ADDRESSES) for target, way in ways]
        return found

    def _sorted_part(self, part: int) -> Ways:
        found = self._unsorted.pop(part, None)
        if found is not None:
            ways = sorted(zip(*found, strict=True))
            targets, sources = (
                array(each.typecode, column)
                for each, column in zip(found, zip(*ways, strict=True), strict=True)
            )
            self._sorted[part] = targets, sources
        return self._sorted.get(part, _NONE)


class CodeXrefs:
    """All references of an image: from code and from data.

    Each kind of reference is collected on first use.
    """

    def __init__(
        self,
        image: ProbedTables,
        bits: int,
        possible_branches: PossibleBranches,
        possible_addresses: PossibleBranches,
    ) -> None:
        self._image = image
        self._word = bits // 8
        self._possible_branches = possible_branches
        self._possible_addresses = possible_addresses

    def tables_changed(self) -> None:
        """Drop the cached references that modules contribute. The caller has loaded or unloaded a module."""
        for name in ("_labels", "_fixups", "_pointers", "_module_branches", "_addresses"):
            self.__dict__.pop(name, None)

    def targets(self, region: range) -> set[int]:
        """Return the addresses in `region` to which jump labels or outside branches may lead.

        A branch is an outside branch if its source is not in `region`.
        """
        branches = (*self._own_branches.pairs(region), *self._module_branches.pairs(region))
        found = {target for target, source in branches if source not in region}
        found.update(target for target, _ in self._labels.pairs(region))
        return found

    def label(self, region: range) -> Rejection | None:
        """Return a rejection if a jump label, enabled or disabled, leads into the region; otherwise None."""
        return _first(RejectReason.JUMP_LABEL_INTO_RANGE, self._labels.into(region))

    def fixup(self, region: range) -> Rejection | None:
        """Return a rejection if an exception fixup lies in the region; otherwise None.

        The rejection's address is the instruction that may fault.
        """
        return _first(RejectReason.FIXUP_INTO_RANGE, self._fixups.into(region))

    def pointer(self, region: range) -> Rejection | None:
        """Return a rejection if a word of data may point into the region; otherwise None.

        An entry of a jump table is an example.
        """
        return _first(RejectReason.POINTER_INTO_RANGE, self._pointers.into(region))

    def address(self, region: range) -> Rejection | None:
        """Return a rejection if an instruction may take an address in the region; otherwise None."""
        return _first(RejectReason.ADDRESS_INTO_RANGE, self._addresses.into(region))

    def branch(self, region: range, symbol: Symbol, is_insn: IsInsn) -> Rejection | None:
        """Return a rejection if a function other than `symbol` branches into the region; otherwise None.

        The cold part of `symbol` counts as another function. `is_insn` excludes bit patterns within
        instructions.
        """

        def is_foreign(source: int) -> bool:
            where = self._image.kallsyms.lookup(source)
            return (
                where is not None and where.symbol.address != symbol.address and is_insn(where.symbol, source)
            )

        sources = (*self._own_branches.into(region), *self._module_branches.into(region))
        return _first(RejectReason.FOREIGN_BRANCH, filter(is_foreign, sources))

    @cached_property
    def _labels(self) -> XrefIndex:
        return XrefIndex((target, code) for code, target, _ in self._image.jump_labels)

    @cached_property
    def _fixups(self) -> XrefIndex:
        return XrefIndex((fixup, insn) for insn, fixup in self._image.ex_table)

    @cached_property
    def _pointers(self) -> XrefIndex:
        span = self._span()
        return XrefIndex(way for piece in self._image.data for way in self._words(*piece) if way[0] in span)

    @cached_property
    def _addresses(self) -> XrefIndex:
        return self._found_in(self._image.text_ranges, self._span(), self._possible_addresses)

    def _span(self) -> range:
        """Return the address range from the first to the last piece of text."""
        text = [range(*part) for part in self._image.text_ranges]
        return range(min(part.start for part in text), max(part.stop for part in text))

    @cached_property
    def _own_branches(self) -> XrefIndex:
        """Branches of the kernel's own text, without modules.

        Their targets are in the kernel's own text too, since it calls modules only through pointers.
        """
        core, *_ = self._image.text_ranges
        return self._found_in((core,), range(*core), self._possible_branches)

    @cached_property
    def _module_branches(self) -> XrefIndex:
        _, *modules = self._image.text_ranges
        return self._found_in(modules, self._span(), self._possible_branches)

    def _found_in(
        self, text: Iterable[tuple[int, int]], span: range, possible: PossibleBranches
    ) -> XrefIndex:
        """Index the references that `possible` finds in ranges of text, if their targets are in `span`."""
        read = self._image.read
        pieces = ((start, read(start, end - start)) for start, end in text)
        return XrefIndex((way for piece in pieces for way in possible(*piece) if way[0] in span), "i")

    def _words(self, addr: int, data: bytes) -> Iterator[tuple[int, int]]:
        """Iterate over the aligned words of `data`: value and address."""
        word = self._word
        words = memoryview(data[: len(data) // word * word]).cast("Q" if word == 8 else "I")
        return zip(words, range(addr, addr + len(data), word), strict=False)


def _first(reason: RejectReason, sources: Iterable[int]) -> Rejection | None:
    first = min(sources, default=None)
    return None if first is None else Rejection(reason, first)
