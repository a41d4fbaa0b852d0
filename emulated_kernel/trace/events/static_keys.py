"""Static keys: branches in the text that are nops while their key is off, and jumps while it is on."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, partial
from typing import Any

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.image.text_tables import JumpLabel
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.text.text_poke import TextPoker


class StaticKeys:
    """Switches static keys by patching their jump labels in the text.

    Mirrors: kernel/jump_label.c:__jump_label_update (v6.1).
    """

    def __init__(
        self, labels: Iterable[JumpLabel], machine: ProbedMachine, poker: TextPoker, arch: Arch
    ) -> None:
        """Create the object that switches the keys. All keys must be off.

        `labels`: the branches of the kernel. The iterable is read at the first use of a key.
        """
        self._text = machine.text
        self._breakpoints = machine.breakpoints
        self._poker = poker
        self._arch = arch
        self._on: set[int] = set()
        self._of_kernel = labels

    @cached_property
    def _labels(self) -> dict[int, list[JumpLabel]]:
        found: dict[int, list[JumpLabel]] = {}
        for label in self._of_kernel:
            found.setdefault(label.key, []).append(label)
        return found

    def add(self, labels: Iterable[JumpLabel]) -> None:
        """Add branches of a loaded module. Patch those whose keys are on into jumps.

        Mirrors: kernel/jump_label.c:jump_label_add_module (v6.1).
        """
        for label in labels:
            self._labels.setdefault(label.key, []).append(label)
            if label.key in self._on:
                self._flip((label,), True)

    def remove(self, labels: Iterable[JumpLabel]) -> None:
        """Forget branches in text that is being unloaded. The text is not changed."""
        gone: dict[int, set[int]] = {}
        for label in labels:
            gone.setdefault(label.key, set()).add(label.code)
        for key, codes in gone.items():
            left = [label for label in self._labels.pop(key) if label.code not in codes]
            if left:
                self._labels[key] = left

    def switch(self, key: int, on: bool) -> None:
        """Patch all branches of the key at address `key` into jumps if `on` is set, else back into nops."""
        if on:
            self._on.add(key)
        else:
            self._on.discard(key)
        self._flip(self._labels.get(key, ()), on)

    def _flip(self, labels: Iterable[JumpLabel], on: bool) -> None:
        insns: dict[int, bytes] = {}
        for label in labels:
            jump = self.jump(label)
            insns[label.code] = jump if on else self._text.original(label.code, len(jump))
            # A CPU that hits the poker's breakpoint continues where the new instruction would continue.
            self._breakpoints[label.code] = partial(_go, label.target if on else label.code + len(jump))
        self._poker.replace_all(insns)
        for code in insns:
            del self._breakpoints[code]

    def jump(self, label: JumpLabel) -> bytes:
        """Return the jump instruction that replaces a branch's nop while its key is on."""
        return self._arch.relative_jump(label.code, label.target)


def _go(to: int, regs: Any) -> None:
    regs.ip = to
