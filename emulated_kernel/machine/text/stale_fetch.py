"""StaleFetch: CPUs run what they had fetched when their turn ended, though text has changed since.

That is the hazard that makes text_poke() synchronise. The machine's CPUs run in turns, so that none really
has anything stale: Prefetch knows what it could have, and StaleFetch lets it run that.
"""

from __future__ import annotations

from random import Random

from emulated_kernel.machine.text.text import Text
from emulated_kernel.util.fast_dataclass import dataclass

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
        """Until now all CPUs are taken as synchronised; each later write to `text` has to be reported.

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


class StaleFetch:
    """Watches text for all CPUs; `serialise` is called at a serialising instruction of one of them.

    Of all that a CPU may have fetched the seed picks one, for one instruction after the other. It lasts until
    the CPU leaves those bytes.
    """

    def __init__(self, text: Text, breakpoints: tuple[bytes, ...], unit: int, seed: int) -> None:
        self._text = text
        self._breakpoints = breakpoints
        self._unit = unit
        self._dice = Random(seed)
        self._fetched: dict[int, tuple[int, Prefetch]] = {}
        """By CPU, inside a changed range: its address, and the bytes written since."""
        self._shown: range | None = None
        self._traps = False
        """What is shown begins with a breakpoint."""
        self._true = bytearray()
        """What really stands where other bytes are shown."""

    def written(self, va: int, before: bytes, after: bytes) -> None:
        """See TextWatcher."""
        if self._shown is not None:
            before = self._replace(va, before, after)
        for _, prefetch in self._fetched.values():
            prefetch.written(va, before, after)

    def _replace(self, va: int, before: bytes, after: bytes) -> bytes:
        """Text is written in the middle of a run that is shown other bytes; what really stood there."""
        assert self._shown is not None
        really = bytearray(before)
        for at, byte in enumerate(after):
            if va + at in self._shown:
                offset = va + at - self._shown.start
                really[at], self._true[offset] = self._true[offset], byte
        return bytes(really)

    def synchronised(self) -> None:
        """See TextWatcher: the interrupts have been taken, or left out."""

    def serialise(self, cpu: int) -> None:
        """A CPU is interrupted, or has trapped: what it runs next is fetched then."""
        self._fetched.pop(cpu, None)

    def serialise_all(self) -> None:
        """The host has entered all of them anew."""
        self._fetched.clear()

    def stopped(self, cpu: int, ip: int, is_preempted: bool) -> None:
        """A CPU's run has ended at `ip`."""
        traps = self._traps
        self._traps = False
        if traps or not is_preempted:
            self.serialise(cpu)
        if not is_preempted:
            return
        start, prefetch = self._fetched.get(cpu, (0, None))
        if prefetch is None or not start <= ip < start + WINDOW:
            start = ip
            prefetch = Prefetch(self._text, self._unit)
        self._fetched[cpu] = start, prefetch

    def show(self, cpu: int, ip: int) -> range | None:
        """Put what the CPU has fetched in the place of text, for one instruction.

        Where that stands; None if nothing differs.
        """
        start, prefetch = self._fetched.get(cpu, (0, None))
        if prefetch is None or not prefetch.concerns(ip):
            return None
        size = start + WINDOW - ip
        true = self._text.current(ip, size)
        windows = {window[:size] for window in prefetch.windows(ip)}
        picked = self._dice.choice(sorted(windows))
        self._shown, self._true = range(ip, ip + size), bytearray(true)
        self._traps = picked.startswith(self._breakpoints)
        self._text.substitute(ip, picked)
        return range(ip, ip + 1)

    def hide(self) -> None:
        """Text is as it should be again."""
        if self._shown is not None:
            shown = self._shown
            self._shown = None
            self._text.substitute(shown.start, bytes(self._true))
