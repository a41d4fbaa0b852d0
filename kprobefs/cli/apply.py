"""`kprobefs apply` and `save`: the mount and the files that they use."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from emulated_kernel.util.safe_read import read_given, read_named
from kprobefs.common import mountpoints
from kprobefs.common.errors import CliError, ExitStatus, escape_for_terminal
from kprobefs.definitions import dropins

TOLD, WIDTH = 20, 1024
"""Lines of a file that failed, and characters of each, that are told."""


def which_mount(named: str | None, way: str = "--mount DIR") -> str:
    """The mount that a command is for: the named one, $KPROBEFS, or the only one. Raises: CliError.

    `way`: in which the command has it named.
    """
    chosen = named or os.environ.get("KPROBEFS")
    if chosen:
        directory = mountpoints.resolve(chosen)
        point = mountpoints.mounted_on(directory)
        if point is None or point.fstype != mountpoints.FSTYPE:
            raise CliError(f"{chosen}: kprobefs isn't mounted there", ExitStatus.NOT_MOUNTED)
    else:
        found = sorted({point.directory for point in mountpoints.our_mounts()})
        if len(found) != 1:
            raise CliError(f"which mount? {way}" if found else "nothing is mounted", ExitStatus.NOT_MOUNTED)
        [directory] = found
    mountpoints.check_answers(directory)
    return directory


def apply(directory: str, files: Sequence[str]) -> list[str]:
    """Apply files to a mount; if none are named, those of the probes.d directories.

    Returns a message for each line and file that failed, made fit for a terminal.
    """
    chosen = files or list(map(str, dropins.files()))
    if not chosen:
        return []
    from kprobefs.definitions.loader import Loader
    from kprobefs.definitions.syntax import read_lines
    from kprobefs.definitions.tracefs_files import HostFiles

    loader = Loader(HostFiles(directory))
    failed = []
    for file in chosen:
        try:
            text = _read(file) if files else dropins.read(Path(file))
        except OSError as error:
            failed.append(escape_for_terminal(f"{file}: {error.strerror}"))
        except CliError as failure:
            failed.append(escape_for_terminal(str(failure)))
        else:
            if "\0" in text:
                failed.append(escape_for_terminal(f"{file}: no file of definitions: it has a NUL"))
                continue
            failed += _first(file, loader.apply(list(read_lines(file, text))))
    return failed


def _first(file: str, failed: list[str]) -> list[str]:
    """What to tell of a file's lines: of many that failed the first ones, none wider than some screens."""
    told = ["\n".join(line[:WIDTH] for line in each.split("\n")) for each in failed[:TOLD]]
    more = len(failed) - len(told)
    return [*told, escape_for_terminal(f"{file}: {more} more lines failed")] if more > 0 else told


def _read(file: str) -> str:
    data = read_given(sys.stdin.fileno(), dropins.LIMIT) if file == "-" else read_named(file, dropins.LIMIT)
    return data.decode("utf-8", "surrogateescape")


def saved(directory: str) -> bytes:
    """What `save` writes."""
    from kprobefs.definitions.saver import saved
    from kprobefs.definitions.tracefs_files import HostFiles, control_root

    with suppress(FileNotFoundError):
        return (control_root(directory) / "machine" / "definitions").read_bytes()
    return "".join(f"{line}\n" for line in saved(HostFiles(directory))).encode("utf-8", "surrogateescape")
