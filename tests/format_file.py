"""A `format` file of tracefs in the short form in which those of a real kernel are recorded."""

from __future__ import annotations

import re

_FIELD = re.compile(r"\tfield:(.*;)\toffset:(\d+);\tsize:(\d+);\tsigned:(\d);")
_COMMON = [
    "format:",
    "  unsigned short common_type; 0 2 0",
    "  unsigned char common_flags; 2 1 0",
    "  unsigned char common_preempt_count; 3 1 0",
    "  int common_pid; 4 4 1",
]
"""Lines with which the fields of all formats begin."""


def in_short(text: str) -> list[str]:
    """Return the lines of the name and the id, then each own field with offset, size and sign, and the print
    format.
    """
    lines = [_FIELD.sub(r"  \1 \2 \3 \4", line) for line in text.splitlines() if line]
    assert lines[2:7] == _COMMON
    return [*lines[:2], *lines[7:]]
