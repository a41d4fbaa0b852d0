"""Patching live text in the steps that keep every CPU on whole instructions."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol


class PokeStep(Enum):
    """What has just been written and synchronised on all CPUs."""

    BREAKPOINT = auto()
    """The first byte is an int3."""
    TAIL = auto()
    """All bytes behind it are the new ones."""
    FIRST_BYTE = auto()
    """The new instruction stands there."""


class PokedText(Protocol):
    def poke(self, va: int, data: bytes, /) -> None: ...


class TextPoker:
    """Replaces an instruction while a breakpoint keeps CPUs from its middle.

    The caller has a handler for a hit in between. `on_step(step, address)` is where tests look, or run
    the guest. Mirrors: arch/x86/kernel/alternative.c:text_poke_bp_batch (v6.1).
    """

    def __init__(self, text: PokedText, breakpoint_: bytes) -> None:
        self._poke = text.poke
        self._breakpoint = breakpoint_
        self.on_step: Callable[[PokeStep, int], None] = lambda _step, _address: None

    def replace(self, va: int, insn: bytes) -> None:
        """Breakpoint, tail, first byte."""
        self.expose_breakpoint(va, insn)
        size = len(self._breakpoint)
        self._poke(va, insn[:size])
        self.on_step(PokeStep.FIRST_BYTE, va)

    def expose_breakpoint(self, va: int, insn: bytes) -> None:
        """Breakpoint, then the tail of `insn`; the breakpoint stays.

        Mirrors: arch/x86/kernel/kprobes/opt.c:arch_unoptimize_kprobe (v6.1).
        """
        size = len(self._breakpoint)
        self._poke(va, self._breakpoint)
        self.on_step(PokeStep.BREAKPOINT, va)
        self._poke(va + size, insn[size:])
        self.on_step(PokeStep.TAIL, va)
