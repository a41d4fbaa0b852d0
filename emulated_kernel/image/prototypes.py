"""Argument counts of an image's functions: noted by the compiler, kept in a file next to the image."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from emulated_kernel.util.safe_read import read_regular

FILE_NAME = "arguments.json"
_LIMIT = 16 << 20
"""Largest size of that file in bytes."""
_PROTOTYPE = re.compile(r"/\* [^ ]+:N[CF] \*/ (?:static|extern) .*?(\w+) \((.*?)\);")
"""A line of gcc's -aux-info; the parameters end at the first ");"."""


def argument_counts(texts: Iterable[str]) -> dict[str, int]:
    """Return function name -> number of named parameters, from gcc's -aux-info of many source files.

    If several functions share a name, the lowest number is taken.
    """
    counts: dict[str, int] = {}
    for text in texts:
        for name, parameters in _PROTOTYPE.findall(text):
            counts[name] = min(_count(parameters), counts.get(name, 1 << 8))
    return counts


def _count(parameters: str) -> int:
    """Count parameters, which commas outside of parentheses separate; `...` doesn't count."""
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
    """Return the text of the file with the counts of these functions, one per line."""
    known = {name: counts[name] for name in sorted(set(names)) if name in counts}
    return json.dumps(known, indent=0) + "\n"


def load_argument_counts(image: Path) -> Mapping[str, int]:
    """Return the counts for an image and its modules: function name -> number; empty if there is no file."""
    try:
        counts: dict[str, int] = json.loads(read_regular(image.with_name(FILE_NAME), _LIMIT))
    except (OSError, ValueError):
        return {}
    return counts
