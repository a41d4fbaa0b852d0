"""TextPoker: patches live text in steps, so that each CPU always executes whole instructions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto

from emulated_kernel.machine.text.text import Text
from emulated_kernel.util.control_lock import ControlLock

_MANY = 256
"""Minimum number of instructions that are replaced in one step, without temporary breakpoints.

This is done only if no CPU can fetch the instructions during the replacement.
"""


class PokeStep(Enum):
    """A step of patching; after each step all CPUs are synchronised."""

    BREAKPOINT = auto()
    """Write a breakpoint (x86: int3) over the start of the instruction."""
    TAIL = auto()
    """Write the new bytes after the breakpoint, if the instruction is longer than the breakpoint."""
    FIRST_BYTE = auto()
    """Write the new bytes in place of the breakpoint."""


class TextPoker:
    """Replaces an instruction under the protection of a breakpoint at the instruction's first byte.

    The caller must handle hits of that breakpoint.
    Mirrors: arch/x86/kernel/alternative.c:text_poke_bp_batch (v6.1).
    """

    def __init__(self, text: Text, breakpoint_: bytes, lock: ControlLock) -> None:
        self._text = text
        self._breakpoint = breakpoint_
        self._lock = lock
        self._patched: tuple[Collection[int], ...] = ()
        """Addresses of the instructions that are being replaced: one collection for each nested call."""

    @property
    def is_busy(self) -> bool:
        """Whether an instruction is being replaced.

        The guest may run between two steps of a replacement and hit a probe. The handling of such a hit
        checks this property before it changes text. Linux: text_mutex is held during a replacement.
        """
        return bool(self._patched)

    def is_patching(self, va: int) -> bool:
        """Return True if the instruction at `va` is being replaced.

        The guest may hit a probe between two steps of the replacement. The handling of such a hit must not
        change this instruction.
        """
        return any(va in places for places in self._patched)

    def has_tail(self, insn: bytes) -> bool:
        """Return True if `insn` is longer than a breakpoint, so that it has bytes after the breakpoint."""
        return len(insn) > len(self._breakpoint)

    def replace(self, va: int, insn: bytes) -> None:
        """Replace the instruction at `va` by `insn`, in three steps: breakpoint, tail, first byte."""
        self.replace_all({va: insn})

    def replace_all(self, insns: Mapping[int, bytes], restored: Collection[int] = (), size: int = 0) -> None:
        """Replace and restore several instructions, with one synchronisation of the CPUs after each step.

        `insns`: address -> new bytes. `restored`: addresses of instructions that get their original bytes,
        `size` bytes each.
        """
        with self._patching(insns, restored):
            if self.takes_one_step(len(insns) + len(restored)):
                places = sorted(insns)
                in_order = places == [*insns]
                self._text.poke_batch(insns.items() if in_order else ((va, insns[va]) for va in places))
                self._text.restore_batch(sorted(restored), size)
                return
            insns = {**insns, **{va: self._text.original(va, size) for va in restored}}
            self._expose(insns)
            self._write(PokeStep.FIRST_BYTE, insns)

    def takes_one_step(self, count: int) -> bool:
        """Return True if `count` instructions are written in one step, without temporary breakpoints.

        This requires at least _MANY instructions, and that no CPU can fetch one of them during the write.
        """
        return count >= _MANY and not self._text.is_fetched_meanwhile

    def expose_breakpoint(self, va: int, insn: bytes) -> None:
        """Write a breakpoint at `va`, and the bytes of `insn` after the breakpoint; the breakpoint stays.

        Mirrors: arch/x86/kernel/kprobes/opt.c:arch_unoptimize_kprobe (v6.1).
        """
        with self._patching((va,)):
            self._expose({va: insn})

    def write_step(self, step: PokeStep, va: int, insn: bytes) -> None:
        """Perform one step of the replacement of the instruction at `va` by `insn`.

        The guest may run for any time between two steps. Only the caller may change the text of the
        instruction between them.
        """
        with self._patching((va,)):
            self._write(step, {va: insn})

    def _expose(self, insns: Mapping[int, bytes]) -> None:
        self._write(PokeStep.BREAKPOINT, insns)
        self._write(PokeStep.TAIL, insns)

    @contextmanager
    def _patching(self, *places: Collection[int]) -> Iterator[None]:
        self._lock.assert_held()
        # Nested calls are possible: a hit at another address may remove a probe's code.
        before = self._patched
        self._patched = (*before, *places)
        try:
            yield
        finally:
            self._patched = before

    def _write(self, step: PokeStep, insns: Mapping[int, bytes]) -> None:
        """Write the bytes of `step` for all instructions `insns`, and synchronise all CPUs.

        `insns`: address -> new bytes of the instruction.
        """
        size = len(self._breakpoint)
        # Generators: there may be tens of thousands.
        if step is PokeStep.BREAKPOINT:
            parts = ((va, self._breakpoint) for va in insns)
        elif step is PokeStep.TAIL:
            parts = ((va + size, insn[size:]) for va, insn in insns.items() if self.has_tail(insn))
        else:
            parts = ((va, insn[:size]) for va, insn in insns.items())
        self._text.poke_batch(parts)
        self._text.sync()
