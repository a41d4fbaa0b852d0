"""Ways into a region that the function around it doesn't show: foreign branches, tables, fixups, labels."""

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
"""Whether an instruction of the function starts at the address."""

PossibleBranches = Callable[[int, bytes], Iterator[tuple[int, int]]]
"""Target and source of what looks like a direct branch in code at an address, wherever instructions begin."""


_PART_BITS = 16
_PART_MASK = (1 << _PART_BITS) - 1
Ways = tuple["array[int]", "array[int]"]
"""Targets by their distance from a part's start, and the way from each to its source."""
_NONE: Ways = array("H"), array("q")


class XrefIndex:
    """Ways by target: of a million of them those into 64 KiB are sorted when they are asked for."""

    def __init__(self, ways: Iterable[tuple[int, int]], distance: str = "q") -> None:
        """`ways`: target and source of each, no further from each other than that type of array holds."""
        targets: defaultdict[int, array[int]] = defaultdict(lambda: array("H"))
        sources: defaultdict[int, array[int]] = defaultdict(lambda: array(distance))
        for target, source in ways:
            part = target >> _PART_BITS
            targets[part].append(target & _PART_MASK)
            sources[part].append(source - target)
        self._unsorted = {part: (targets[part], sources[part]) for part in targets}
        self._sorted: dict[int, Ways] = {}

    def into(self, region: range) -> list[int]:
        """The sources of the ways into a region, by target."""
        return [source for _, source in self.pairs(region)]

    def pairs(self, region: range) -> list[tuple[int, int]]:
        """Target and source of each way into a region."""
        found: list[tuple[int, int]] = []
        for part in range(region.start >> _PART_BITS, (region.stop >> _PART_BITS) + 1):
            base = part << _PART_BITS
            targets, sources = self._sorted_part(part)
            first = bisect_left(targets, region.start - base)
            last = bisect_left(targets, region.stop - base)
            ways = zip(targets[first:last], sources[first:last], strict=True)
            found += [(base + target, base + target + way) for target, way in ways]
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
    """All of an image; each kind is searched when it is first asked for."""

    def __init__(self, image: ProbedTables, bits: int, possible_branches: PossibleBranches) -> None:
        self._image = image
        self._word = bits // 8
        self._possible_branches = possible_branches

    def tables_changed(self) -> None:
        """A module came or went; what the kernel's own text has is left."""
        for name in ("_labels", "_fixups", "_pointers", "_module_branches"):
            self.__dict__.pop(name, None)

    def targets(self, region: range) -> set[int]:
        """Where labels, and what looks like a branch from outside, lead to in it."""
        branches = (*self._own_branches.pairs(region), *self._module_branches.pairs(region))
        found = {target for target, source in branches if source not in region}
        found.update(target for target, _ in self._labels.pairs(region))
        return found

    def label(self, region: range) -> Rejection | None:
        """A jump label, on or off, that leads into the region."""
        return _first(RejectReason.JUMP_LABEL_INTO_RANGE, self._labels.into(region))

    def fixup(self, region: range) -> Rejection | None:
        """An instruction whose exception fixup lies in the region."""
        return _first(RejectReason.FIXUP_INTO_RANGE, self._fixups.into(region))

    def pointer(self, region: range) -> Rejection | None:
        """A word of data that could be an address in the region: an entry of a jump table."""
        return _first(RejectReason.POINTER_INTO_RANGE, self._pointers.into(region))

    def branch(self, region: range, symbol: Symbol, is_insn: IsInsn) -> Rejection | None:
        """A branch into the region out of another function than `symbol`, as out of its cold part."""

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

    def _span(self) -> range:
        """All text, and what is between its pieces."""
        text = [range(*part) for part in self._image.text_ranges]
        return range(min(part.start for part in text), max(part.stop for part in text))

    @cached_property
    def _own_branches(self) -> XrefIndex:
        """The kernel's own text doesn't branch to that of modules: it calls them by pointers."""
        core, *_ = self._image.text_ranges
        return self._branches((core,), range(*core))

    @cached_property
    def _module_branches(self) -> XrefIndex:
        _, *modules = self._image.text_ranges
        return self._branches(modules, self._span())

    def _branches(self, text: Iterable[tuple[int, int]], span: range) -> XrefIndex:
        read = self._image.read
        pieces = ((start, read(start, end - start)) for start, end in text)
        return XrefIndex(
            (branch for piece in pieces for branch in self._possible_branches(*piece) if branch[0] in span),
            "i",
        )

    def _words(self, addr: int, data: bytes) -> Iterator[tuple[int, int]]:
        """Each aligned word, and where it stands."""
        word = self._word
        words = memoryview(data[: len(data) // word * word]).cast("Q" if word == 8 else "I")
        return zip(words, range(addr, addr + len(data), word), strict=False)


def _first(reason: RejectReason, sources: Iterable[int]) -> Rejection | None:
    first = min(sources, default=None)
    return None if first is None else Rejection(reason, first)
