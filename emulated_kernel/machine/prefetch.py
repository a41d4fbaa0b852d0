"""What CPUs may have fetched before text changed under them: the hazard that makes text_poke() synchronise.

Since the machine's CPUs run in turns, none of them really has anything stale. Here is what it could have;
machine/stale.py lets a CPU run it.
"""

from __future__ import annotations

from dataclasses import dataclass

from emulated_kernel.machine.text import Text

WINDOW = 16
"""Bytes that a CPU fetches ahead at most."""


@dataclass(frozen=True, slots=True)
class _Write:
    va: int
    before: bytes

    def undo(self, va: int, window: bytearray) -> None:
        """Make `window`, which begins at `va`, as it was before this write."""
        for at, byte in enumerate(self.before, self.va - va):
            if 0 <= at < len(window):
                window[at] = byte


class Prefetch:
    """Follows the writes to text since the CPUs last executed a serialising instruction.

    A CPU fetches at any moment, and what straddles a cache line in two parts at two moments.
    Source: "Djprobe" (Ottawa Linux Symposium 2007), section 2.3; Linux: text_poke_bp_batch (v6.1).
    """

    def __init__(self, text: Text, unit: int) -> None:
        """Until now all CPUs are taken as synchronised; what is written to `text` has to be told.

        `unit`: bytes that are fetched in one piece, where they are aligned to as many.
        """
        self._text = text
        self._unit = unit
        self._writes: list[_Write] = []

    def written(self, va: int, before: bytes, after: bytes) -> None:
        """See TextWatcher."""
        if before != after:
            self._writes.append(_Write(va, before))

    def synchronised(self) -> None:
        """See TextWatcher."""
        self._writes.clear()

    def concerns(self, va: int) -> bool:
        """Whether anything changed of what a CPU about to execute at `va` has fetched."""
        return any(write.va < va + WINDOW and va < write.va + len(write.before) for write in self._writes)

    def windows(self, va: int) -> set[bytes]:
        """All that a CPU about to execute at `va` may have fetched, what stands there now included."""
        moments = self._moments(va)
        return {
            early[:split] + late[split:]
            for early in moments
            for late in moments
            for split in range(-va % self._unit, WINDOW + 1, self._unit)
        }

    def _moments(self, va: int) -> set[bytes]:
        """The text at `va` as of each moment since the last synchronisation."""
        window = bytearray(self._text.current(va, WINDOW))
        found = {bytes(window)}
        for write in reversed(self._writes):
            write.undo(va, window)
            found.add(bytes(window))
        return found
