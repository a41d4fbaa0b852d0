"""TextGarbage: executable memory that nothing leads to any more, until no CPU and no task is in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from emulated_kernel.kprobes.work import DelayedWork

COLLECT_DELAY = 5
"""Jiffies until the garbage is looked at, so that much goes at once."""

Span = tuple[int, int]
"""Addresses [start, end)."""


@dataclass(frozen=True, eq=False, slots=True)
class _Piece:
    span: Span
    free: Callable[[], None]
    leads_on: bool


class TextGarbage:
    """Slots, detours and handlers that were taken out of use: each is freed when nobody can be in it.

    That is so when no CPU stands there, and no register and no live stack holds an address there. Linux:
    waits for grace periods, of which `synchronize_rcu_tasks` is the longest. Callers hold the kernel's
    control lock.
    """

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self.work = DelayedWork(self._work)
        self.occupied: Callable[[Sequence[Span]], Collection[Span]] = lambda _spans: ()
        """Those of the ranges that somebody stands in, or comes back to."""

    @property
    def spans(self) -> list[Span]:
        """All of it; CPUs that stand there still go on into text."""
        return [piece.span for piece in self._pieces]

    def put(self, span: Span, free: Callable[[], None], *, leads_on: bool = False) -> None:
        """Call `free` when nobody is there; `leads_on`: from there CPUs go on into other garbage."""
        self._pieces.append(_Piece(span, free, leads_on))
        self.work.schedule(COLLECT_DELAY)

    def collect(self) -> bool:
        """Free what can be freed now; False: something is left."""
        occupied = set(self.occupied(self.spans)) if self._pieces else set()
        stuck = [piece for piece in self._pieces if piece.span in occupied]
        if any(piece.leads_on for piece in stuck):
            return False
        freed = [piece for piece in self._pieces if piece.span not in occupied]
        self._pieces = stuck
        for piece in freed:
            piece.free()
        return not stuck

    def _work(self) -> None:
        if not self.collect():
            self.work.schedule(COLLECT_DELAY)
