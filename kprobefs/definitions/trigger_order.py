"""Order of hist triggers: a trigger that defines a variable precedes the triggers that use the variable."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from emulated_kernel.util.lazy_pattern import lazy_pattern

_DEFINED = lazy_pattern(r"(?<=[:,=])(?P<name>\w+)=")
"""Matches `NAME=` at the start of a field or of an assignment within one."""
_USED = lazy_pattern(r"\$(?P<name>\w+)")


def by_need(triggers: Sequence[str]) -> list[int]:
    """Return the indices of `triggers` in an order in which each variable is defined before it is used.

    Triggers that do not depend on each other keep their order. If triggers depend on each other in a circle,
    one of them comes too early.
    """
    defining = defaultdict[str, list[int]](list)
    for index, trigger in enumerate(triggers):
        for match in _DEFINED.finditer(trigger):
            defining[match["name"]].append(index)
    ordered: list[int] = []
    visited: set[int] = set()
    # A stack in place of recursion: a chain of variables may be longer than Python's limit.
    for first in range(len(triggers)):
        pending = [(first, False)]
        while pending:
            index, is_ready = pending.pop()
            if is_ready:
                ordered.append(index)
            elif index not in visited:
                visited.add(index)
                pending.append((index, True))
                needed = {
                    number for match in _USED.finditer(triggers[index]) for number in defining[match["name"]]
                }
                pending += [(number, False) for number in sorted(needed - visited, reverse=True)]
    return ordered
