"""Argument counts of an image's functions, from the compiler's output.

The counts are in a file next to the image.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from emulated_kernel.util.lazy_pattern import lazy_pattern
from emulated_kernel.util.safe_read import read_regular

FILE_NAME = "arguments.json"
_LIMIT = 16 << 20
"""Maximum size of the file with the argument counts, in bytes."""
_PROTOTYPE = lazy_pattern(r"/\* [^ ]+:N[CF] \*/ (?:static|extern) .*?(\w+) \((.*?)\);")
"""Regular expression for a line of gcc's -aux-info; the parameters end at the first ");"."""


def argument_counts(texts: Iterable[str]) -> dict[str, int]:
    """Return function name -> number of named parameters.

    `texts`: outputs of gcc's option -aux-info for the source files. If several functions share a name, the
    lowest number counts.
    """
    counts: dict[str, int] = {}
    for text in texts:
        for name, parameters in _PROTOTYPE.findall(text):
            counts[name] = min(_count(parameters), counts.get(name, 1 << 8))
    return counts


def _count(parameters: str) -> int:
    """Return the number of parameters in the text of a parameter list, without `...`.

    Commas outside of parentheses separate parameters.
    """
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
    """Return the text of the file FILE_NAME, with the argument counts of the functions `names`.

    Functions that are not in `counts` are left out.
    """
    known = {name: counts[name] for name in sorted(set(names)) if name in counts}
    return json.dumps(known, indent=0) + "\n"


def load_argument_counts(image: Path) -> Mapping[str, int]:
    """Return the argument counts for an image and its modules: function name -> number of parameters.

    The result is empty if the image has no file with argument counts.
    """
    try:
        counts: dict[str, int] = json.loads(read_regular(image.with_name(FILE_NAME), _LIMIT))
    except (OSError, ValueError):
        return {}
    return counts
