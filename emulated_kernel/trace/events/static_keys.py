"""Static keys: their branches are nops in the text, or jumps while the key is switched on."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.image.text_tables import JumpLabel
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.text.text_poke import TextPoker


class StaticKeys:
    """Flips the jump labels of a key. Mirrors: kernel/jump_label.c:__jump_label_update (v6.1)."""

    def __init__(
        self, labels: Iterable[JumpLabel], machine: ProbedMachine, poker: TextPoker, arch: Arch
    ) -> None:
        self._text = machine.text
        self._breakpoints = machine.breakpoints
        self._poker = poker
        self._arch = arch
        self._on: set[int] = set()
        self._labels: dict[int, list[JumpLabel]] = {}
        self.add(labels)

    def add(self, labels: Iterable[JumpLabel]) -> None:
        """Branches that came with a module: they are jumps if their keys are on.

        Mirrors: kernel/jump_label.c:jump_label_add_module (v6.1)
        """
        for label in labels:
            self._labels.setdefault(label.key, []).append(label)
            if label.key in self._on:
                self._flip((label,), True)

    def remove(self, labels: Iterable[JumpLabel]) -> None:
        """Branches whose text goes: they are left as they are."""
        gone: dict[int, set[int]] = {}
        for label in labels:
            gone.setdefault(label.key, set()).add(label.code)
        for key, codes in gone.items():
            left = [label for label in self._labels.pop(key) if label.code not in codes]
            if left:
                self._labels[key] = left

    def switch(self, key: int, on: bool) -> None:
        """Make all branches of the key jumps, or nops again."""
        (self._on.add if on else self._on.discard)(key)
        self._flip(self._labels.get(key, ()), on)

    def _flip(self, labels: Iterable[JumpLabel], on: bool) -> None:
        insns: dict[int, bytes] = {}
        for label in labels:
            insn = jump = self.jump(label)
            if not on:
                insn = self._text.original(label.code, len(jump))
            insns[label.code] = insn
            # For a CPU that meets the poker's breakpoint: what the new instruction does.
            self._breakpoints[label.code] = partial(_go, label.target if on else label.code + len(jump))
        self._poker.replace_all(insns)
        for code in insns:
            del self._breakpoints[code]

    def jump(self, label: JumpLabel) -> bytes:
        """What stands there while the key is on."""
        return self._arch.relative_jump(label.code, label.target)


def _go(to: int, regs: Any) -> None:
    regs.ip = to
