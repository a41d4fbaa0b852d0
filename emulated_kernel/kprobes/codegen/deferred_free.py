"""DeferredFree: frees executable memory after no register and no stack holds an address in it any more."""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.kprobes.quiescence import DelayedWork, GracePeriod, Span
from emulated_kernel.util.fast_dataclass import dataclass

COLLECT_DELAY = 5
"""Number of jiffies after which unused pieces are freed; the delay lets one check free several pieces."""


@dataclass(frozen=True, eq=False, slots=True)
class _DeferredPiece:
    span: Span
    free: Callable[[], None]
    leads_on: bool


class DeferredFree:
    """Frees unused pieces of executable memory (slots, detours and handlers) when they are quiescent.

    A piece is quiescent when no CPU's register and no live stack holds an address in the piece. Linux waits
    for grace periods; the longest one is that of synchronize_rcu_tasks().
    """

    def __init__(self, scheduler: GracePeriod) -> None:
        self._scheduler = scheduler
        self._pieces: list[_DeferredPiece] = []
        self.work = DelayedWork(self._work, scheduler)

    @property
    def spans(self) -> list[Span]:
        """Address ranges of the pieces that are not freed yet; a CPU in a piece may still jump into text."""
        return [piece.span for piece in self._pieces]

    def add(self, span: Span, free: Callable[[], None], *, leads_on: bool = False) -> None:
        """Call `free` once `span` is quiescent.

        `leads_on`: whether code in `span` may jump to other pieces. If so, no piece is freed while `span` is
        not quiescent.
        """
        self._pieces.append(_DeferredPiece(span, free, leads_on))
        self.work.schedule(COLLECT_DELAY)

    def collect(self) -> bool:
        """Free the quiescent pieces; return False if any piece is left.

        If a piece that was added with `leads_on` is not quiescent, free no piece.
        """
        occupied = set(self._scheduler.in_use_ranges(self.spans)) if self._pieces else set()
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
