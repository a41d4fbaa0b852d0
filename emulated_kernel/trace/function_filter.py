"""set_ftrace_filter and set_ftrace_notrace: sets of functions, chosen by patterns of names."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence

from emulated_kernel.errors import KernelError
from emulated_kernel.trace.chars import bytes_to_text
from emulated_kernel.trace.filter_pattern import parse_pattern

Functions = Sequence[tuple[int, str]]
"""Fentry sites with the names of their functions, in the order of addresses."""


def matching(functions: Functions, pattern: bytes) -> frozenset[int]:
    """Sites whose functions' names match; a number means the one that stands there, counted from 1.

    Mirrors: kernel/trace/ftrace.c:match_records (v6.1).
    """
    if pattern.isdigit():
        return frozenset(site for site, _ in functions[max(int(pattern) - 1, 0) : int(pattern)])
    wanted, _ = parse_pattern(pattern)
    names = ((site, name.encode() + b"\0") for site, name in functions)
    return frozenset(site for site, name in names if wanted.matches(name, len(name)))


class FunctionSet:
    """What one of the files holds; an empty set stands for no choice at all."""

    def __init__(self, functions: Functions, title: str, changed: Callable[[], None]) -> None:
        """`title` is shown while the set is empty."""
        self._functions = functions
        self._title = title
        self._changed = changed
        self.sites: frozenset[int] = frozenset()

    def choose(self, pattern: bytes) -> None:
        """Add the functions that match, or take them out with "!" before the pattern.

        Raises: KernelError EINVAL (there are none). Mirrors: ftrace_match_records (v6.1).
        """
        found = matching(self._functions, pattern.removeprefix(b"!"))
        if not found:
            raise KernelError(errno.EINVAL, f"no function matches {bytes_to_text(pattern)}")
        self.sites = self.sites - found if pattern.startswith(b"!") else self.sites | found
        self._changed()

    def clear(self) -> None:
        """Opening for writing with O_TRUNC."""
        if self.sites:
            self.sites = frozenset()
            self._changed()

    def records(self) -> Iterator[str]:
        """The lines of the file."""
        if not self.sites:
            yield f"#### {self._title} ####\n"
        for site, name in self._functions:
            if site in self.sites:
                yield f"{name}\n"
