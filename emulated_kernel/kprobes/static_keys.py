"""Static keys: their branches are nops in the text, or jumps while the key is switched on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol


class JumpLabel(Protocol):
    @property
    def code(self) -> int: ...

    @property
    def target(self) -> int: ...

    @property
    def key(self) -> int: ...


class LabelText(Protocol):
    def original(self, va: int, size: int, /) -> bytes: ...


class LabelPoker(Protocol):
    def replace_all(self, insns: Mapping[int, bytes], /) -> None: ...


class StaticKeys:
    """Flips the jump labels of a key. Mirrors: kernel/jump_label.c:__jump_label_update (v6.1)."""

    def __init__(
        self,
        labels: Iterable[JumpLabel],
        text: LabelText,
        poker: LabelPoker,
        breakpoints: dict[int, Callable[[Any], None]],
        relative_jump: Callable[[int, int], bytes],
    ) -> None:
        self._text = text
        self._poker = poker
        self._breakpoints = breakpoints
        self._relative_jump = relative_jump
        self._labels: dict[int, list[JumpLabel]] = {}
        for label in labels:
            self._labels.setdefault(label.key, []).append(label)

    def switch(self, key: int, on: bool) -> None:
        """Make all branches of the key jumps, or nops again."""
        insns: dict[int, bytes] = {}
        for label in self._labels.get(key, ()):
            insn = jump = self._relative_jump(label.code, label.target)
            if not on:
                insn = self._text.original(label.code, len(jump))
            insns[label.code] = insn
            # For a CPU that meets the poker's breakpoint: what the new instruction does.
            self._breakpoints[label.code] = partial(_go, label.target if on else label.code + len(jump))
        self._poker.replace_all(insns)
        for code in insns:
            del self._breakpoints[code]


def _go(to: int, regs: Any) -> None:
    regs.ip = to
