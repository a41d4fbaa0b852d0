"""References from outside a function into a region of its code: branches, pointers, fixups, jump labels."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial

from emulated_kernel.arch.analysis.byte_search import positions
from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.image.kallsyms import Symbol
from emulated_kernel.image.text_tables import ProbedTables

IsInsn = Callable[[Symbol, int], bool]
"""Callable (function, address) that returns True if an instruction of the function starts at the address."""

Reference = tuple[int, int]
"""Target address and source address of a reference."""

PossibleReferences = Callable[[int, bytes, range | None], Iterator[Reference]]
"""Function (address, code at the address, window) that yields references from bit patterns in the code.

A pattern looks like a direct branch, for example, and may start at any byte, even in the middle of an
instruction. The window is a range of targets: the function yields all references to them, and maybe
references to other addresses. If the window is None, the function yields the references to all addresses.
"""

WINDOWS = 8
"""Maximum number of windows (16 KiB of targets) that are searched singly, before all references are indexed.

In a distribution's kernel, the search for the references into one window takes 3 % of the time of indexing
all branches.
"""

_PART_BITS = 14
_PART_MASK = (1 << _PART_BITS) - 1
_ADDRESSES = 1 << 64
"""Number of 64-bit addresses. Distances between addresses are computed modulo this number."""
_LEAST = -1 << 63
"""Lowest distance between two addresses, as a signed number of 64 bits."""
Ways = tuple["array[int]", "array[int]"]
"""References into one window of 16 KiB: offsets of the targets in the window, and source - target of each."""
_NONE: Ways = array("H"), array("q")


class XrefIndex:
    """Index of references, ordered by target.

    A kernel can have a million references. So into() and pairs() at first search only for references into the
    windows of 16 KiB that they need. If more windows than a limit are needed, all references are indexed. The
    references into a window are sorted on first use.
    """

    def __init__(
        self, search: Callable[[range | None], Iterable[Reference]], *, windows: int = 0, distance: str = "q"
    ) -> None:
        """Prepare the index of the references that `search` returns.

        `search`: function that returns at least the references into a window, or all references if it is
        called with None. `windows`: number of windows that are searched before all references are indexed.
        `distance`: type code, as in the module array, for integers that can hold source - target.
        """
        self._search = search
        self._windows = windows
        self._distance = distance
        self._unsorted: dict[int, Ways] | None = None
        """Number of a window -> unsorted references into it; None until all references are indexed.

        The number is the window's first address, divided by 16 KiB.

        Windows that have been sorted are removed.
        """
        self._sorted: dict[int, Ways] = {}

    def into(self, region: range) -> list[int]:
        """Return the source addresses of all references into a region, ordered by target."""
        return [source for _, source in self.pairs(region)]

    def pairs(self, region: range) -> list[Reference]:
        """Return the target and source address of each reference into a region, ordered by target."""
        found: list[Reference] = []
        for part in range(region.start >> _PART_BITS, (region.stop - 1 >> _PART_BITS) + 1):
            base = part << _PART_BITS
            targets, sources = self._sorted_part(part)
            first = bisect_left(targets, region.start - base)
            last = bisect_left(targets, region.stop - base)
            if first == last:
                continue
            ways = zip(targets[first:last], sources[first:last], strict=True)
            found += [(base + target, (base + target + way) % _ADDRESSES) for target, way in ways]
        return found

    def _sorted_part(self, part: int) -> Ways:
        if part not in self._sorted:
            self._sorted[part] = _in_order(self._part(part))
        return self._sorted[part]

    def _part(self, part: int) -> Ways:
        """Return the references into window number `part`, in the order in which they were found."""
        if self._unsorted is None and len(self._sorted) < self._windows:
            window = range(part << _PART_BITS, (part + 1) << _PART_BITS)
            return self._by_window(self._search(window)).get(part, _NONE)
        if self._unsorted is None:
            self._unsorted = self._by_window(self._search(None))
        return self._unsorted.pop(part, _NONE)

    def _by_window(self, ways: Iterable[Reference]) -> dict[int, Ways]:
        targets: defaultdict[int, array[int]] = defaultdict(lambda: array("H"))
        sources: defaultdict[int, array[int]] = defaultdict(lambda: array(self._distance))
        present: int | None = None
        for target, source in ways:
            part = target >> _PART_BITS
            # Most branches are short, so most targets are in the window of the target before.
            if part != present:
                present = part
                add_target = targets[part].append
                add_source = sources[part].append
            add_target(target & _PART_MASK)
            # The distance is computed modulo 2**64, because a distribution's kernel links per-CPU data at
            # address 0.
            add_source((source - target - _LEAST) % _ADDRESSES + _LEAST)
        return {part: (targets[part], sources[part]) for part in targets}


def _in_order(ways: Ways) -> Ways:
    targets, sources = ways
    if not targets:
        return _NONE
    columns = zip(*sorted(zip(targets, sources, strict=True)), strict=True)
    return array("H", next(columns)), array(sources.typecode, next(columns))


class CodeXrefs:
    """All references in an image, from code and from data.

    Each kind of reference is collected on first use.
    """

    def __init__(
        self,
        image: ProbedTables,
        bits: int,
        possible_branches: PossibleReferences,
        possible_addresses: PossibleReferences,
        *,
        windows: int = WINDOWS,
    ) -> None:
        """Store `image` and the functions that find its references. The search begins on first use.

        `bits`: size of a word in bits. `possible_branches` finds direct branches in code, and
        `possible_addresses` finds instructions that take an address.
        `windows`: for each kind of reference in code or data, the number of 16-KiB windows of targets that
        are searched one at a time. A request for a further window indexes all references; see XrefIndex.
        """
        self._image = image
        self._word = bits // 8
        self._windows = windows
        self._possible_branches = possible_branches
        self._possible_addresses = possible_addresses

    def tables_changed(self) -> None:
        """Drop the cached references of modules; the next request collects them again.

        The caller has loaded or unloaded a module.
        """
        for name in ("_labels", "_fixups", "_pointers", "_module_branches", "_addresses"):
            self.__dict__.pop(name, None)

    def targets(self, region: range) -> set[int]:
        """Return the addresses in `region` to which jump labels, or branches from outside, may lead.

        A branch is from outside if its source is not in `region`.
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

        For example, the word may be an entry of a jump table.
        """
        return _first(RejectReason.POINTER_INTO_RANGE, self._pointers.into(region))

    def address(self, region: range) -> Rejection | None:
        """Return a rejection if an instruction may take an address in the region; otherwise None."""
        return _first(RejectReason.ADDRESS_INTO_RANGE, self._addresses.into(region))

    def branch(self, region: range, symbol: Symbol, is_insn: IsInsn) -> Rejection | None:
        """Return a rejection if a function other than `symbol` branches into the region; otherwise None.

        The cold part of `symbol` counts as another function. `is_insn` returns False for bit patterns within
        other instructions.
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
        return XrefIndex(lambda _: ((target, code) for code, target, _ in self._image.jump_labels))

    @cached_property
    def _fixups(self) -> XrefIndex:
        return XrefIndex(lambda _: ((fixup, insn) for insn, fixup in self._image.ex_table))

    @cached_property
    def _pointers(self) -> XrefIndex:
        span = self._span()

        def search(window: range | None) -> Iterator[Reference]:
            words = self._words if window is None else partial(self._words_into, window)
            return (way for piece in self._image.data for way in words(*piece) if way[0] in span)

        return XrefIndex(search, windows=self._windows)

    @cached_property
    def _addresses(self) -> XrefIndex:
        return self._found_in(self._image.text_ranges, self._span(), self._possible_addresses)

    def _span(self) -> range:
        """Return the address range from the start of the first range of text to the end of the last one."""
        text = [range(*part) for part in self._image.text_ranges]
        return range(min(part.start for part in text), max(part.stop for part in text))

    @cached_property
    def _own_branches(self) -> XrefIndex:
        """Branches of the kernel's own text, without modules.

        Their targets are in the kernel's own text too, because the kernel calls modules only through
        pointers.
        """
        core, *_ = self._image.text_ranges
        return self._found_in((core,), range(*core), self._possible_branches)

    @cached_property
    def _module_branches(self) -> XrefIndex:
        _, *modules = self._image.text_ranges
        return self._found_in(modules, self._span(), self._possible_branches)

    def _found_in(
        self, text: Iterable[tuple[int, int]], span: range, possible: PossibleReferences
    ) -> XrefIndex:
        """Return an index of the references that `possible` finds in `text` and whose targets are in `span`.

        `text`: start and end address of each range of text.
        """
        read = self._image.read

        def search(window: range | None) -> Iterator[Reference]:
            wanted = span if window is None else _shared(span, window)
            pieces = ((start, read(start, end - start)) for start, end in text)
            return (way for piece in pieces for way in possible(*piece, window) if way[0] in wanted)

        return XrefIndex(search, windows=self._windows, distance="i")

    def _words(self, addr: int, data: bytes) -> Iterator[Reference]:
        """Yield (value, address) of each aligned word of `data`.

        `addr`: address of the start of `data`.
        """
        word = self._word
        words = memoryview(data[: len(data) // word * word]).cast("Q" if word == 8 else "I")
        return zip(words, range(addr, addr + len(data), word), strict=False)

    def _words_into(self, window: range, addr: int, data: bytes) -> Iterator[Reference]:
        """Yield value and address of each aligned word in `data` whose value is in `window`.

        `addr`: address of the start of `data`.
        """
        word = self._word
        for upper in range(window.start >> 16, (window.stop - 1 >> 16) + 1):
            for at in positions(data, upper.to_bytes(word - 2, "little"), 2, len(data)):
                value = upper << 16 | int.from_bytes(data[at - 2 : at], "little")
                if at % word == 2 and value in window:
                    yield value, addr + at - 2


def _shared(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _first(reason: RejectReason, sources: Iterable[int]) -> Rejection | None:
    first = min(sources, default=None)
    return None if first is None else Rejection(reason, first)
