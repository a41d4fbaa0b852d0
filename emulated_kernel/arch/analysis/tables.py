"""The tables of a kernel that decide where it can be probed, whether it runs or is only a file."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from emulated_kernel.image.kallsyms import Kallsyms


class ProbedTables(Protocol):
    """A kernel's text and its tables about it; all addresses are virtual."""

    @property
    def kallsyms(self) -> Kallsyms: ...

    @property
    def text_ranges(self) -> Iterable[tuple[int, int]]:
        """Start and end of each piece of text, the kernel's own first."""

    @property
    def blacklist(self) -> Iterable[tuple[int, int, str]]:
        """Start, end and name of functions that mustn't be probed."""

    @property
    def mcount(self) -> Collection[int]:
        """ftrace's sites."""

    @property
    def ex_table(self) -> Iterable[tuple[int, int]]:
        """Instructions that may fault, and their fixups."""

    @property
    def bugs(self) -> Collection[int]:
        """Traps of BUG() and WARN()."""

    @property
    def jump_labels(self) -> Iterable[tuple[int, int, int]]:
        """Code, target and key."""

    @property
    def static_calls(self) -> Iterable[tuple[int, int, bool]]:
        """Site, key, and whether it is a tail call."""

    @property
    def data(self) -> Iterable[tuple[int, bytes]]:
        """What isn't text, with its addresses."""

    def read(self, va: int, size: int, /) -> bytes:
        """Bytes as they were before anything was probed."""
