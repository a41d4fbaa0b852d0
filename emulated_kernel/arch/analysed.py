"""The tables of a kernel binary, as those ask for them who decide what can be probed, and how."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol


class Symbol(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def address(self) -> int: ...

    @property
    def size(self) -> int: ...


class Location(Protocol):
    """A symbol and the offset into it, in bytes."""

    @property
    def symbol(self) -> Symbol: ...

    @property
    def offset(self) -> int: ...

    @property
    def module(self) -> str | None: ...


class Symbols(Protocol):
    def lookup(self, address: int, /) -> Location | None: ...

    def lookup_name(self, name: str, /) -> int | None: ...


class AnalysedImage(Protocol):
    """The tables of a kernel binary that the rules look at."""

    @property
    def kallsyms(self) -> Symbols: ...

    @property
    def text_ranges(self) -> Sequence[tuple[int, int]]: ...

    @property
    def ex_table(self) -> Iterable[tuple[int, int]]: ...

    @property
    def mcount(self) -> Collection[int]: ...

    @property
    def jump_labels(self) -> Iterable[tuple[int, int, int]]: ...

    @property
    def data(self) -> Iterable[tuple[int, bytes]]: ...

    def read(self, va: int, size: int, /) -> bytes: ...
