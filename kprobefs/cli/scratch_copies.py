"""Copies a command's files to scratch/, where they belong to the emulated kernel."""

from __future__ import annotations

import filecmp
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

NAMES = 5
"""Maximum number of file names that a message lists."""


@contextmanager
def copies_of_arguments(command: Sequence[str], scratch: Path, own: str = "") -> Iterator[str]:
    """Copy to scratch/ the files and directories that a command's words name; yield the copies' directory.

    Regular files and directories with relative paths without ".." are copied, and the command itself if it
    has such a path. Words may have the form NAME=PATH. `own`: name of a new directory in scratch/ for the
    copies, if other users may use the mount; "": the copies are in scratch/ itself. The yielded directory is
    that of the copies, or scratch/ if nothing is copied. At the end, report the copies that the command has
    changed, and remove all copies. The directory `own` is removed unless the command has created files in it;
    these are reported.
    Raises: OSError (scratch/ has no space).
    """
    place = scratch / own
    copied: dict[Path, Path] = {}
    made: list[Path] = []
    try:
        for source in map(Path, _named_paths(command)):
            if source.is_absolute() or ".." in source.parts:
                continue
            for file in _files_below(source):
                if own and not made:
                    place.mkdir()
                    made.append(place)
                _copy(file, place, copied, made)
        yield str(place if made or copied else scratch)
        changed = [target for target, source in copied.items() if _differ(source, target)]
        _report([str(target.relative_to(place)) for target in changed], "changed only in scratch/")
    finally:
        for target in copied:
            target.unlink(missing_ok=True)
        for directory in reversed(made):
            with suppress(OSError):
                directory.rmdir()
        if own:
            with suppress(OSError):
                _report(sorted(os.listdir(place)), f"created in scratch/{own}")


def _named_paths(command: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command that may be paths, and the values in words of the form NAME=VALUE."""
    program, *arguments = command
    # A command without a slash is looked up in PATH.
    if "/" in program:
        yield program
    for word in arguments:
        yield word
        yield word.partition("=")[2]


def _files_below(source: Path) -> Iterator[Path]:
    """Yield the regular file `source`, or the regular files and directories below the directory `source`."""
    # An argument may be a whole shell script, which is longer than any file name.
    if os.path.isfile(source):
        yield source
    elif os.path.isdir(source) and source.parts:
        for directory, _, names in os.walk(source):
            yield Path(directory)
            yield from (path for name in names if (path := Path(directory, name)).is_file())


def _copy(source: Path, scratch: Path, copied: dict[Path, Path], made: list[Path]) -> None:
    """Copy the file `source` with its mode to scratch/, or make the directory `source` there.

    Existing files in scratch/ stay unchanged. Add the copy to `copied` (copy -> original), and new
    directories to `made`.
    """
    target = scratch / source
    is_directory = source.is_dir()
    for directory in (*reversed(target.parents), *([target] if is_directory else [])):
        if scratch in directory.parents and not directory.exists():
            directory.mkdir()
            made.append(directory)
    if not is_directory and not os.path.lexists(target):
        copied[target] = source
        shutil.copyfile(source, target)
        target.chmod(stat.S_IMODE(source.stat().st_mode))


def report_results(scratch: Path) -> None:
    """Report the files that a command has left in the scratch/ of a temporary mount."""
    with suppress(OSError):
        _report(sorted(os.listdir(scratch)), "created in scratch/, which is removed with this mount")


def _differ(one: Path, two: Path) -> bool:
    with suppress(OSError):
        return not filecmp.cmp(one, two, shallow=False)
    return False


def _report(names: Sequence[str], what: str) -> None:
    """Print a one-line message about the files `names`. Print no message if `names` is empty.

    `what`: statement about the files, which follows their names in the message.
    """
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    if names:
        message = f"{', '.join(names[:NAMES])}{more}: {what}; use absolute paths for files to keep"
        from kprobefs.common.terminal import print_message

        print_message(message)
