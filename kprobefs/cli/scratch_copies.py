"""Copies of a command's files in scratch/, where they are the emulated kernel's, and messages about them."""

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
"""Files that a line names at most."""


@contextmanager
def copies_of_arguments(command: Sequence[str], scratch: Path) -> Iterator[str]:
    """scratch/, with the regular files there that a command's arguments name by paths without "..".

    What of it the command has changed is told of: the copies go.
    """
    copied: dict[Path, Path] = {}
    made: list[Path] = []
    try:
        for word in command[1:]:
            source = Path(word)
            target = scratch / word
            if source.is_absolute() or ".." in source.parts:
                continue
            # A script that a shell is given may be longer than any name.
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
        _tell_of([str(target.relative_to(scratch)) for target in changed], "changed in scratch/ alone")
    finally:
        for target in copied:
            target.unlink(missing_ok=True)
        for directory in reversed(made):
            with suppress(OSError):
                directory.rmdir()


def tell_of_results(scratch: Path) -> None:
    """What a command has left in a scratch/ that goes."""
    with suppress(OSError):
        _tell_of(sorted(os.listdir(scratch)), "made in scratch/, which goes with this mount")


def _differ(one: Path, two: Path) -> bool:
    with suppress(OSError):
        return not filecmp.cmp(one, two, shallow=False)
    return False


def _tell_of(names: Sequence[str], what: str) -> None:
    """In one line, where there are any."""
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    if names:
        told = f"{', '.join(names[:NAMES])}{more}: {what}; what is written to an absolute path stays"
        print(f"kprobefs: {escape_for_terminal(told)}", file=sys.stderr)


def why_nothing(command: Sequence[str], scratch: Path) -> str:
    """For people."""
    if not scratch.is_dir():
        return "nothing was recorded: this mount has no scratch/, so no file of the command's is its kernel's"
    hosts = [
        escape_for_terminal(word) for word in command[1:] if os.path.isabs(word) and os.path.isfile(word)
    ]
    named = f", such as {hosts[0]}," if hosts else ""
    return f"nothing was recorded: what is done to files outside of scratch/{named} hits no probe"
