"""A hint at the end of `run`: why the kernel refused the last definition of a command that has failed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from emulated_kernel.util.lazy_pattern import lazy_pattern
from kprobefs.definitions.tracefs_files import HostFiles

HINT = 'tracing/error_log ends with "{error}" for "{command}"'
UNLOGGED = 'tracing/error_log has no entry for "{command}"; {reason}'
HINT_LINE = lazy_pattern(r"kprobefs: (tracing/error_log (?:ends with|has no entry for) .*)")
"""Pattern of the line with a hint that `run` prints; its group is the hint."""
_ENTRY = lazy_pattern(r"^\[ *[0-9.]+\] (.*)\n  Command: (.*)$", re.MULTILINE)
"""Pattern for an entry of error_log; its groups are the error and the command."""


def refusals(directory: str, unlogged: Sequence[str] | None = None) -> Iterator[str]:
    """Yield a hint with the last definition that the mount at `directory` refused, if it has refused one.

    `unlogged`: this definition and the reason, if error_log has no entry for it. Linux logs nothing, for
    example, about a kind of event that it does not have. Otherwise, the hint has the last entry of error_log.
    A shell may report only that a write failed: dash says "I/O error" for each errno.
    """
    if unlogged is not None:
        command, reason = unlogged
        yield UNLOGGED.format(command=command.strip(), reason=reason)
        return
    with suppress(OSError):
        log = Path(directory, HostFiles(directory).tracefs(), "error_log").read_text(errors="replace")
        entries = [*_ENTRY.finditer(log)]
        if entries:
            yield HINT.format(error=entries[-1][1], command=entries[-1][2].strip())
