"""How many arguments the functions of an image take: noted by the compiler, kept beside the image."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from emulated_kernel.util.safe_read import read_regular

FILE_NAME = "arguments.json"
_LIMIT = 16 << 20
"""Bytes of that file."""
_PROTOTYPE = re.compile(r"/\* [^ ]+:N[CF] \*/ (?:static|extern) .*?(\w+) \((.*?)\);")
"""A line of gcc's -aux-info; the parameters end at the first ");"."""


def argument_counts(texts: Iterable[str]) -> dict[str, int]:
    """Function to its number of named parameters, from the compiler's notes on many sources.

    Of functions that share a name the one with the fewest counts.
    """
    counts: dict[str, int] = {}
    for text in texts:
        for name, parameters in _PROTOTYPE.findall(text):
            counts[name] = min(_count(parameters), counts.get(name, 1 << 8))
    return counts


def _count(parameters: str) -> int:
    """Commas outside of parentheses part them; `...` is none."""
    depth = 0
    parts = [""]
    for char in parameters:
        depth += (char == "(") - (char == ")")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return sum(part.strip() not in ("", "void", "...") for part in parts)


def to_json(counts: Mapping[str, int], names: Iterable[str]) -> str:
    """The file's text: the counts of these functions, a line each."""
    known = {name: counts[name] for name in sorted(set(names)) if name in counts}
    return json.dumps(known, indent=0) + "\n"


def load_argument_counts(image: Path) -> Mapping[str, int]:
    """Those of the image's functions and its modules'; empty where nothing was noted of it."""
    try:
        counts: dict[str, int] = json.loads(read_regular(image.with_name(FILE_NAME), _LIMIT))
    except (OSError, ValueError):
        return {}
    return counts
