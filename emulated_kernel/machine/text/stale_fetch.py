"""StaleFetch: lets CPUs execute instructions that they fetched before text was patched, for tests.

Because real CPUs prefetch, text_poke() synchronises them. The machine's CPUs run in turns, and none of them
really prefetches. Prefetch computes the bytes that a CPU could have fetched, and StaleFetch lets the CPU
execute these bytes.
"""

from __future__ import annotations

from random import Random

from emulated_kernel.machine.text.text import Text
from emulated_kernel.util.fast_dataclass import dataclass

WINDOW = 16
"""Largest number of bytes that a CPU prefetches."""


@dataclass(frozen=True, slots=True)
class _Write:
    va: int
    before: bytes

    def undo(self, va: int, window: bytearray) -> None:
        """Undo this write in `window`, a copy of the text at `va`."""
        for at, byte in enumerate(self.before, self.va - va):
            if 0 <= at < len(window):
                window[at] = byte


class Prefetch:
    """Records the writes to text since the CPUs last executed a serialising instruction.

    A CPU can fetch at any moment. If an instruction lies in two aligned pieces (see __init__), the CPU
    fetches them at two moments.
    Source: "Djprobe" (Ottawa Linux Symposium 2007), section 2.3; Linux: text_poke_bp_batch (v6.1).
    """

    def __init__(self, text: Text, unit: int) -> None:
        """Create a record without writes: all CPUs count as synchronised now.

        Callers must report later writes to `text` by written().

        `unit` is the size in bytes of an aligned piece that is fetched atomically.
        """
        self._text = text
        self._unit = unit
        self._writes: list[_Write] = []

    def written(self, va: int, before: bytes, after: bytes) -> None:
        """Record a write to text; see TextWatcher."""
        if before != after:
            self._writes.append(_Write(va, before))

    def synchronised(self) -> None:
        """Forget all writes, because no CPU has stale bytes any more; see TextWatcher."""
        self._writes.clear()

    def concerns(self, va: int) -> bool:
        """Return True if a CPU that executes code at `va` may have fetched bytes that have changed since."""
        return any(write.va < va + WINDOW and va < write.va + len(write.before) for write in self._writes)

    def windows(self, va: int) -> set[bytes]:
        """Return all variants of the WINDOW bytes at `va` that a CPU may have fetched to execute them."""
        moments = self._moments(va)
        return {
            early[:split] + late[split:]
            for early in moments
            for late in moments
            for split in range(-va % self._unit, WINDOW + 1, self._unit)
        }

    def _moments(self, va: int) -> set[bytes]:
        """Return the values of the WINDOW bytes at `va` at each moment since the last synchronisation."""
        window = bytearray(self._text.current(va, WINDOW))
        found = {bytes(window)}
        for write in reversed(self._writes):
            write.undo(va, window)
            found.add(bytes(window))
        return found


class StaleFetch:
    """Makes CPUs execute bytes of text that they may have prefetched before the text was changed.

    For each instruction that show() replaces, a random generator selects one of the variants that the CPU may
    have fetched. The constructor's `seed` determines the selection. The machine calls serialise() when a CPU
    executes a serialising instruction.
    """

    def __init__(self, text: Text, breakpoints: tuple[bytes, ...], unit: int, seed: int) -> None:
        self._text = text
        self._breakpoints = breakpoints
        self._unit = unit
        self._dice = Random(seed)
        self._fetched: dict[int, tuple[int, Prefetch]] = {}
        """CPU number -> address of the first prefetched byte, and the writes since the prefetch."""
        self._shown: range | None = None
        self._traps = False
        """Whether the substituted bytes begin with a breakpoint."""
        self._true = bytearray()
        """The real text at the addresses of the substituted bytes."""

    def written(self, va: int, before: bytes, after: bytes) -> None:
        """Record a write to text for each CPU that has prefetched bytes; see TextWatcher."""
        if self._shown is not None:
            before = self._replace(va, before, after)
        for _, prefetch in self._fetched.values():
            prefetch.written(va, before, after)

    def _replace(self, va: int, before: bytes, after: bytes) -> bytes:
        """Apply a write to the real text during a run with substituted bytes.

        `before` are the bytes in memory before the write, of which some may be substituted. Return the real
        bytes before the write.
        """
        assert self._shown is not None
        really = bytearray(before)
        for at, byte in enumerate(after):
            if va + at in self._shown:
                offset = va + at - self._shown.start
                really[at], self._true[offset] = self._true[offset], byte
        return bytes(really)

    def synchronised(self) -> None:
        """Do nothing; see TextWatcher.

        For each CPU that text_poke_sync() interrupted, serialise() has been called already.
        """

    def serialise(self, cpu: int) -> None:
        """Drop the prefetched bytes of CPU `cpu`, which was interrupted or has trapped."""
        self._fetched.pop(cpu, None)

    def serialise_all(self) -> None:
        """Drop the prefetched bytes of all CPUs, which the host has stopped and resumed."""
        self._fetched.clear()

    def stopped(self, cpu: int, ip: int, is_preempted: bool) -> None:
        """Record that the run of CPU `cpu` has ended at `ip`.

        If `is_preempted` is True, the CPU has prefetched the bytes at `ip`; otherwise it has no prefetched
        bytes any more.
        """
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
        """Replace the text at `ip` by the bytes that CPU `cpu` has prefetched, for one instruction.

        The run must end at the first instruction outside of the returned range. Return None if nothing was
        replaced.
        """
        start, prefetch = self._fetched.get(cpu, (0, None))
        if prefetch is None or not prefetch.concerns(ip):
            return None
        size = start + WINDOW - ip
        true = self._text.current(ip, size)
        windows = {window[:size] for window in prefetch.windows(ip)}
        picked = self._dice.choice(sorted(windows))
        self._shown = range(ip, ip + size)
        self._true = bytearray(true)
        self._traps = picked.startswith(self._breakpoints)
        self._text.substitute(ip, picked)
        return range(ip, ip + 1)

    def hide(self) -> None:
        """Restore the real text after show() has substituted prefetched bytes."""
        if self._shown is not None:
            shown = self._shown
            self._shown = None
            self._text.substitute(shown.start, bytes(self._true))
