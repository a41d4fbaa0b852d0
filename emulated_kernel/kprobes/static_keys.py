"""Static keys: their branches are nops in the text, or jumps while the key is switched on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol


class JumpLabel(Protocol):
    @property
    def code(self) -> int: ...

    @property
    def target(self) -> int: ...

    @property
    def key(self) -> int: ...


class PatchedText(Protocol):
    def poke_batch(self, pokes: Iterable[tuple[int, bytes]], /) -> None: ...

    def original(self, va: int, size: int, /) -> bytes: ...


class StaticKeys:
    """Flips the jump labels of a key. Mirrors: kernel/jump_label.c:__jump_label_update (v6.1)."""

    def __init__(
        self, labels: Iterable[JumpLabel], text: PatchedText, relative_jump: Callable[[int, int], bytes]
    ) -> None:
        self._text = text
        self._jumps: dict[int, list[tuple[int, bytes]]] = {}
        for label in labels:
            jump = label.code, relative_jump(label.code, label.target)
            self._jumps.setdefault(label.key, []).append(jump)

    def switch(self, key: int, on: bool) -> None:
        """Make all branches of the key jumps, or nops again."""
        jumps, original = self._jumps.get(key, []), self._text.original
        self._text.poke_batch(jumps if on else [(at, original(at, len(jump))) for at, jump in jumps])
