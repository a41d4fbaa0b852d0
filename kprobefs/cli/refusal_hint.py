"""A hint at the end of `run`: why the kernel refused the last definition of a command that has failed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from emulated_kernel.util.lazy_pattern import lazy_pattern
from kprobefs.definitions.tracefs_files import HostFiles

HINT = 'tracing/error_log ends with "{error}" for "{command}"'
HINT_LINE = lazy_pattern(r"kprobefs: (tracing/error_log ends with .*)")
"""Pattern of the line with a hint that `run` prints; its group is the hint."""
_ENTRY = lazy_pattern(r"^\[ *[0-9.]+\] (.*)\n  Command: (.*)$", re.MULTILINE)
"""Pattern for an entry of error_log; its groups are the error and the command."""


def refusals(directory: str) -> Iterator[str]:
    """Yield a hint with the last entry of error_log in the mount at `directory`, if it has one.

    A shell may report only that a write failed: dash says "I/O error" for each errno.
    """
    with suppress(OSError):
        log = Path(directory, HostFiles(directory).tracefs(), "error_log").read_text(errors="replace")
        entries = [*_ENTRY.finditer(log)]
        if entries:
            yield HINT.format(error=entries[-1][1], command=entries[-1][2].strip())
