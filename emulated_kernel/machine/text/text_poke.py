"""Patching live text in the steps that keep every CPU on whole instructions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto
from itertools import repeat
from operator import itemgetter

from emulated_kernel.machine.text.text import Text
from emulated_kernel.util.control_lock import ControlLock


class PokeStep(Enum):
    """What has just been written and synchronised on all CPUs."""

    BREAKPOINT = auto()
    """The first byte is an int3."""
    TAIL = auto()
    """All bytes behind it are the new ones."""
    FIRST_BYTE = auto()
    """The new instruction stands there."""


class TextPoker:
    """Replaces an instruction while a breakpoint keeps CPUs from its middle.

    The caller has a handler for a hit in between.
    Mirrors: arch/x86/kernel/alternative.c:text_poke_bp_batch (v6.1).
    """

    def __init__(self, text: Text, breakpoint_: bytes, lock: ControlLock) -> None:
        self._text = text
        self._breakpoint = breakpoint_
        self._lock = lock
        self._patched: frozenset[int] = frozenset()

    @property
    def is_busy(self) -> bool:
        """Text is being patched: a hit in between makes nothing new of it. Linux: text_mutex is held."""
        return bool(self._patched)

    def is_patching(self, va: int) -> bool:
        """Whether what stands there is being replaced: a hit in between must leave it alone."""
        return va in self._patched

    def replace(self, va: int, insn: bytes) -> None:
        """Breakpoint, tail, first byte."""
        self.replace_all({va: insn})

    def replace_all(self, insns: Mapping[int, bytes]) -> None:
        """The same for several instructions at once, with one synchronisation a step for all."""
        with self._patching(insns):
            self._expose(insns)
            self._write(PokeStep.FIRST_BYTE, insns)

    def expose_breakpoint(self, va: int, insn: bytes) -> None:
        """Breakpoint, then the tail of `insn`; the breakpoint stays.

        Mirrors: arch/x86/kernel/kprobes/opt.c:arch_unoptimize_kprobe (v6.1).
        """
        with self._patching((va,)):
            self._expose({va: insn})

    def _expose(self, insns: Mapping[int, bytes]) -> None:
        self._write(PokeStep.BREAKPOINT, insns)
        self._write(PokeStep.TAIL, insns)

    @contextmanager
    def _patching(self, places: Iterable[int]) -> Iterator[None]:
        self._lock.assert_held()
        # A hit in between, of another place, may take its code away.
        before = self._patched
        self._patched = self._patched.union(places)
        try:
            yield
        finally:
            self._patched = before

    def _write(self, step: PokeStep, insns: Mapping[int, bytes]) -> None:
        """Write the part of each that a step changes; when it returns no CPU has an older one."""
        breakpoint_ = self._breakpoint
        size = len(breakpoint_)
        # No lists of what may be tens of thousands.
        if step is PokeStep.BREAKPOINT:
            self._text.poke_batch(zip(insns, repeat(breakpoint_), strict=False))
        elif step is PokeStep.TAIL:
            tails = map(itemgetter(slice(size, None)), insns.values())
            self._text.poke_batch(zip(map(size.__add__, insns), tails, strict=True))
        else:
            firsts = map(itemgetter(slice(size)), insns.values())
            self._text.poke_batch(zip(insns, firsts, strict=True))
        self._text.sync()
