"""Names of a kernel's symbols that resemble a name which does not exist, for error messages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

from emulated_kernel.util.lazy_pattern import lazy_pattern
from emulated_kernel.util.similar_names import SHOWN, similar_names

if TYPE_CHECKING:
    from emulated_kernel.image.kallsyms import Kallsyms

_COMPARED = 4 * SHOWN
"""Maximum number of similar names that are looked up to find at most SHOWN names of functions."""
_SYMBOL = lazy_pattern(r"[A-Za-z_][\w.]*")
_PADDING = "__pfx_"
"""Prefix of the symbols that name the padding before functions."""
_PREFIX = 4
"""Number of leading characters that a symbol must share with a wrong name to be compared with it."""


def nearest_symbols(name: str, kallsyms: Kallsyms) -> list[str]:
    """Return at most SHOWN names of functions that are near to `name`, which does not exist.

    If the compiler has split off parts of the function `name`, return their names. Otherwise, return the
    names that end with the word `name`: `sys_read` exists as `__x64_sys_read`. If there are none of either
    kind, return the most similar names.
    """
    exact = _starting(f"{name}.", kallsyms) or sorted(_ending(f"_{name}", kallsyms), key=_rank)
    if name and (found := _functions(exact, kallsyms)):
        return found
    for length in (_PREFIX, 2, 0):
        names = _starting(name[:length], kallsyms)
        if found := _functions(similar_names(name, names, _COMPARED), kallsyms):
            return found
    return []


def nearest_listed(name: str, listing: str) -> list[str]:
    """Return at most SHOWN symbols that are most similar to `name`. `listing`: content of a kallsyms file.

    Return [] if the symbol exists, or if no symbol can have such a name.
    """
    known = {word for line in listing.splitlines() for word in line.split()[2:3]}
    if name in known or not _SYMBOL.fullmatch(name):
        return []
    for length in (_PREFIX, 2):
        begun = sorted(each for each in known if each.startswith(name[:length]))
        if found := similar_names(name, begun):
            return found
    return []


def _functions(names: Iterable[str], kallsyms: Kallsyms) -> list[str]:
    """Return the first SHOWN of `names` that are names of functions.

    Names of the padding before functions are left out, because padding cannot be probed.
    """
    found = (
        name
        for name in names
        if not name.startswith(_PADDING) and any(symbol.is_text for symbol in kallsyms.by_name(name))
    )
    return list(islice(found, SHOWN))


def _rank(name: str) -> tuple[bool, int]:
    """Return a sort key: names with two leading underscores first; within each group, shorter names first.

    Entries of system calls have such underscores, for example `__x64_sys_read`.
    """
    return not name.startswith("__"), len(name)


def _starting(prefix: str, kallsyms: Kallsyms) -> list[str]:
    pattern = rb"\0(" + re.escape(prefix.encode("utf-8", "replace")) + rb"[^\0]*)"
    return _distinct(found[1] for found in re.finditer(pattern, kallsyms.table.names))


def _ending(suffix: str, kallsyms: Kallsyms) -> list[str]:
    table = kallsyms.table
    known = suffix.encode("utf-8", "replace").decode()
    return _distinct(table.name(index) for index in table.ending(re.escape(known)))


def _distinct(names: Iterable[bytes]) -> list[str]:
    return list(dict.fromkeys(name.decode("utf-8", "replace") for name in names))
