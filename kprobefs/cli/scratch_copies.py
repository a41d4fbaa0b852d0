"""Copies a command's files to scratch/, where they belong to the emulated kernel, and explains results."""

from __future__ import annotations

import filecmp
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kprobefs.common.errors import escape_for_terminal

NAMES = 5
"""Maximum number of file names that a message lists."""


@contextmanager
def copies_of_arguments(command: Sequence[str], scratch: Path) -> Iterator[str]:
    """Copy the files that a command's arguments name to scratch/, and yield the path of scratch/.

    Regular files with relative paths without ".." are copied. At the end, report the copies that the
    command has changed, and remove all copies.
    """
    copied: dict[Path, Path] = {}
    made: list[Path] = []
    try:
        for word in command[1:]:
            source = Path(word)
            target = scratch / word
            if source.is_absolute() or ".." in source.parts:
                continue
            # An argument may be a whole shell script, which is longer than any file name.
            if not os.path.isfile(source) or os.path.lexists(target):
                continue
            for directory in reversed(target.parents):
                if scratch in directory.parents and not directory.exists():
                    directory.mkdir()
                    made.append(directory)
            copied[target] = source
            shutil.copyfile(source, target)
        yield str(scratch)
        changed = [target for target, source in copied.items() if _differ(source, target)]
        _report([str(target.relative_to(scratch)) for target in changed], "changed only in scratch/")
    finally:
        for target in copied:
            target.unlink(missing_ok=True)
        for directory in reversed(made):
            with suppress(OSError):
                directory.rmdir()


def report_results(scratch: Path) -> None:
    """Report the files that a command has left in the scratch/ of a temporary mount."""
    with suppress(OSError):
        _report(sorted(os.listdir(scratch)), "created in scratch/, which is removed with this mount")


def _differ(one: Path, two: Path) -> bool:
    with suppress(OSError):
        return not filecmp.cmp(one, two, shallow=False)
    return False


def _report(names: Sequence[str], what: str) -> None:
    """Print a one-line message about the files `names`; print nothing if there are none."""
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    if names:
        message = f"{', '.join(names[:NAMES])}{more}: {what}; use absolute paths for files to keep"
        print(f"kprobefs: {escape_for_terminal(message)}", file=sys.stderr)


def why_nothing(command: Sequence[str], scratch: Path) -> str:
    """Return a message that explains why `kprobefs trace` recorded nothing."""
    if not scratch.is_dir():
        return "nothing was recorded: this mount has no scratch/; only files there belong to its kernel"
    hosts = [
        escape_for_terminal(word) for word in command[1:] if os.path.isabs(word) and os.path.isfile(word)
    ]
    named = f", such as {hosts[0]}," if hosts else ""
    return f"nothing was recorded: files outside of scratch/{named} hit no probe"
