"""Names of a kernel's symbols that resemble a name which does not exist, for error messages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

from emulated_kernel.image.kallsyms import Kallsyms

SHOWN = 3
"""Maximum number of similar symbols that an error message names."""
SIMILAR = 0.7
"""Least similarity, from 0 to 1, of a symbol that an error message names."""
_PREFIX = 4
"""Number of leading characters that a symbol must share with a wrong name to be compared with it."""


def nearest_symbols(name: str, kallsyms: Kallsyms) -> list[str]:
    """Return the symbols whose names are most similar to `name`, which does not exist.

    Parts of the function `name` that the compiler has split off come first.
    """
    parts = [f"{name}{suffix}" for suffix in _suffixes(name, kallsyms)]
    if parts:
        return parts[:SHOWN]
    for length in (_PREFIX, 2, 0):
        names = _starting(name[:length], kallsyms)
        if found := get_close_matches(name, names, SHOWN, SIMILAR):
            return found
    return []


def _starting(prefix: str, kallsyms: Kallsyms) -> list[str]:
    pattern = rb"\0(" + re.escape(prefix.encode("utf-8", "replace")) + rb"[^\0]*)"
    names = (found[1].decode("utf-8", "replace") for found in re.finditer(pattern, kallsyms.table.names))
    return list(dict.fromkeys(names))


def _suffixes(name: str, kallsyms: Kallsyms) -> Iterable[str]:
    return (each[len(name) :] for each in _starting(f"{name}.", kallsyms))
