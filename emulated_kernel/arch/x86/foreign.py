"""Branches that aren't seen in the function that they lead into: those of others, as of its own cold part."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

_BRANCH = re.compile(rb"(?s)(?=([\x70-\x7f\xe0-\xe3\xeb].|[\xe8\xe9]....|\x0f[\x80-\x8f]....))")
_SHORT = 2
"""Bytes of a branch with a displacement of one byte."""


class BranchIndex:
    """Branches by target."""

    def __init__(self, branches: Iterable[tuple[int, int]]) -> None:
        """`branches`: target and source of each."""
        found = sorted(branches)
        self._targets = [target for target, _ in found]
        self._sources = [source for _, source in found]

    def into(self, region: range, is_meant: Callable[[int], bool] = lambda _source: True) -> int | None:
        """The source of a branch into `region`: the first of those that `is_meant` says yes to."""
        first, last = bisect_left(self._targets, region.start), bisect_left(self._targets, region.stop)
        return min(filter(is_meant, self._sources[first:last]), default=None)


def possible_branches(addr: int, code: bytes) -> Iterator[tuple[int, int]]:
    """Target and source of what looks like a direct branch, at any byte: which of them are code is unknown.

    Decoding a whole kernel for the few of them that matter would take ten times as long.
    """
    from_bytes = int.from_bytes
    for match in _BRANCH.finditer(code):
        insn, source = match[1], addr + match.start()
        displacement = insn[1:] if len(insn) == _SHORT else insn[-4:]
        yield source + len(insn) + from_bytes(displacement, "little", signed=True), source
