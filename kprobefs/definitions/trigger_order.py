"""Order of hist triggers: a trigger that defines a variable precedes the triggers that use the variable."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from emulated_kernel.util.lazy_pattern import lazy_pattern
from kprobefs.definitions.syntax import Line

_DEFINED = lazy_pattern(r"(?<=[:,=])(?P<name>\w+)=")
"""Matches `NAME=` at the start of a field or of an assignment within one."""
_USED = lazy_pattern(r"\$(?P<name>\w+)")


def by_need(lines: Sequence[Line]) -> list[Line]:
    """Return the lines of triggers in an order in which each variable is defined before it is used.

    Lines that do not depend on each other keep their order. If lines depend on each other in a circle, one
    of them comes too early.
    """
    defining = defaultdict[str, list[int]](list)
    for index, line in enumerate(lines):
        for match in _DEFINED.finditer(line.text):
            defining[match["name"]].append(index)
    ordered: list[Line] = []
    visited: set[int] = set()
    # A stack in place of recursion: a chain of variables may be longer than Python's limit.
    for first in range(len(lines)):
        pending = [(first, False)]
        while pending:
            index, is_ready = pending.pop()
            if is_ready:
                ordered.append(lines[index])
            elif index not in visited:
                visited.add(index)
                pending.append((index, True))
                needed = {
                    number
                    for match in _USED.finditer(lines[index].text)
                    for number in defining[match["name"]]
                }
                pending += [(number, False) for number in sorted(needed - visited, reverse=True)]
    return ordered
