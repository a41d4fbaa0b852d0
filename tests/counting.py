"""Counts of function calls and lines of Python, which measure the work of an action independently of the
host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def calls_of(action: Callable[[T], object], each: Iterable[T]) -> int:
    """Return the number of Python's function calls while `action` is called for each item."""
    calls = 0

    def trace(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(trace)
    try:
        for one in each:
            action(one)
    finally:
        sys.setprofile(None)
    return calls


def lines_of(action: Callable[[], object]) -> int:
    """Return the number of Python's lines that run while `action` is called, with each round of a loop."""
    lines = 0

    def trace(_frame: Any, event: str, _argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return lines
