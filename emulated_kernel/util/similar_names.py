"""Names that resemble a name which does not exist, for error messages."""

from __future__ import annotations

from collections.abc import Iterable

SHOWN = 3
"""Maximum number of similar names that an error message suggests."""
_SIMILAR = 0.7
"""Minimum similarity of a suggested name to the unknown name: difflib's ratio, from 0 to 1."""


def similar_names_hint(names: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: a suggestion of the similar names `names`.

    Return "" if `names` is empty.
    """
    shown = ", ".join(names)
    return f"; similar names: {shown}" if shown else ""


def similar_names(name: str, known: Iterable[str], count: int = SHOWN) -> list[str]:
    """Return at most `count` of the names `known` that are similar to `name`, the most similar first."""
    from difflib import get_close_matches

    return get_close_matches(name, list(dict.fromkeys(known)), count, _SIMILAR)
