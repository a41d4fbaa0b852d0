"""Functions that the compiler made from a function of the source, and that callers call in its place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from emulated_kernel.image.kallsyms import Kallsyms
from emulated_kernel.util.lazy_pattern import lazy_pattern

CLONE = r"\.(isra|constprop|part)\.\d+"
"""Pattern for the end of a clone's name. GCC names a clone after the function from which it is made."""
_CLONE = lazy_pattern(CLONE)


def clone_names(kallsyms: Kallsyms) -> Iterable[str]:
    """Return the names of the kernel's own functions that are clones, in the order of their addresses."""
    table = kallsyms.table
    return (table.name(index).decode("utf-8", "replace") for index in table.ending(CLONE))


def clones_by_function(names: Iterable[str]) -> Mapping[str, Sequence[str]]:
    """Return a map from functions' names to the names of their clones, for the symbols called `names`.

    Names that are not those of clones are ignored. A clone can be made from a clone: NAME.isra.0.part.1
    belongs to NAME and to NAME.isra.0.
    """
    found: dict[str, dict[str, None]] = {}
    for name in names:
        ends = [each.span() for each in _CLONE.finditer(name)]
        if ends and ends[-1][1] == len(name):
            for start, _ in ends:
                found.setdefault(name[:start], {})[name] = None
    return {function: [*clones] for function, clones in found.items()}


def calls_of_clones(function: str, clones: Sequence[str]) -> str:
    """Return a sentence for the output: some calls of a function with clones may not hit a probe on it."""
    called = f"callers may call {', '.join(clones)} instead"
    return f"{called}, which the compiler made from {function}, and do not hit this probe"
