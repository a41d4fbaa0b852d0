"""Ways into a region that the function around it doesn't show: foreign branches, tables, fixups, labels."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

from emulated_kernel.arch.analysis.reason import Finding, Reason
from emulated_kernel.arch.analysis.tables import ProbedTables
from emulated_kernel.image.kallsyms import Symbol

IsInsn = Callable[[Symbol, int], bool]
"""Whether an instruction of the function starts at the address."""

PossibleBranches = Callable[[int, bytes], Iterator[tuple[int, int]]]
"""Target and source of what looks like a direct branch in code at an address, wherever instructions begin."""


class WayIndex:
    """Ways by target."""

    def __init__(self, ways: Iterable[tuple[int, int]]) -> None:
        """`ways`: target and source of each."""
        found = sorted(ways)
        self._targets = [target for target, _ in found]
        self._sources = [source for _, source in found]

    def into(self, region: range) -> list[int]:
        """The sources of the ways into a region, by target."""
        first, last = bisect_left(self._targets, region.start), bisect_left(self._targets, region.stop)
        return self._sources[first:last]


class Entrances:
    """All of an image as it is now; each kind is searched when it is first asked for."""

    def __init__(self, image: ProbedTables, bits: int, possible_branches: PossibleBranches) -> None:
        self._image = image
        self._word = bits // 8
        self._possible_branches = possible_branches

    def label(self, region: range) -> Finding | None:
        """A jump label, on or off, that leads into the region."""
        return _first(Reason.JUMP_LABEL_INTO_RANGE, self._labels.into(region))

    def fixup(self, region: range) -> Finding | None:
        """An instruction whose exception fixup lies in the region."""
        return _first(Reason.FIXUP_INTO_RANGE, self._fixups.into(region))

    def pointer(self, region: range) -> Finding | None:
        """A word of data that could be an address in the region: an entry of a jump table."""
        return _first(Reason.POINTER_INTO_RANGE, self._pointers.into(region))

    def branch(self, region: range, symbol: Symbol, is_insn: IsInsn) -> Finding | None:
        """A branch into the region out of another function than `symbol`, as out of its cold part."""

        def is_foreign(source: int) -> bool:
            where = self._image.kallsyms.lookup(source)
            return (
                where is not None and where.symbol.address != symbol.address and is_insn(where.symbol, source)
            )

        return _first(Reason.FOREIGN_BRANCH, filter(is_foreign, self._branches.into(region)))

    @cached_property
    def _labels(self) -> WayIndex:
        return WayIndex((target, code) for code, target, _ in self._image.jump_labels)

    @cached_property
    def _fixups(self) -> WayIndex:
        return WayIndex((fixup, insn) for insn, fixup in self._image.ex_table)

    @cached_property
    def _pointers(self) -> WayIndex:
        text = [range(*part) for part in self._image.text_ranges]
        span = range(min(part.start for part in text), max(part.stop for part in text))
        return WayIndex(way for piece in self._image.data for way in self._words(*piece) if way[0] in span)

    @cached_property
    def _branches(self) -> WayIndex:
        read = self._image.read
        text = ((start, read(start, end - start)) for start, end in self._image.text_ranges)
        return WayIndex(branch for piece in text for branch in self._possible_branches(*piece))

    def _words(self, addr: int, data: bytes) -> Iterator[tuple[int, int]]:
        """Each aligned word, and where it stands."""
        word = self._word
        words = memoryview(data[: len(data) // word * word]).cast("Q" if word == 8 else "I")
        return zip(words, range(addr, addr + len(data), word), strict=False)


def _first(reason: Reason, sources: Iterable[int]) -> Finding | None:
    first = min(sources, default=None)
    return None if first is None else Finding(reason, first)
