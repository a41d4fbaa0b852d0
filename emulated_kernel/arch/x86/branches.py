"""Finding direct branches in text without decoding it."""

from __future__ import annotations

import re
from collections.abc import Iterator

_BRANCH = re.compile(rb"(?s)(?=([\x70-\x7f\xe0-\xe3\xeb].|[\xe8\xe9]....|\x0f[\x80-\x8f]....))")
_SHORT = 2
"""Bytes of a branch with a displacement of one byte."""


def possible_branches(addr: int, code: bytes) -> Iterator[tuple[int, int]]:
    """Target and source of what looks like a direct branch, at any byte: which of them are code is unknown.

    Decoding a whole kernel for the few of them that matter would take ten times as long.
    """
    from_bytes = int.from_bytes
    for match in _BRANCH.finditer(code):
        insn, source = match[1], addr + match.start()
        displacement = insn[1:] if len(insn) == _SHORT else insn[-4:]
        yield source + len(insn) + from_bytes(displacement, "little", signed=True), source
