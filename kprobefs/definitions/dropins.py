"""Drop-in files: the *.probes files of the system and of the user, which every new mount applies."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.safe_read import open_regular, read_named, read_open
from kprobefs.common.errors import CliError

SYSTEM = ("/etc/kprobefs/probes.d", "/run/kprobefs/probes.d", "/usr/lib/kprobefs/probes.d")
"""Directories of the system's drop-in files, the most important directory first."""
VARIABLE = "KPROBEFS_PROBES_PATH"
"""Environment variable with directories, separated by colons, that replace the default directories."""
LIMIT = 64 << 20
"""Maximum size of a file of definitions in bytes."""


def directories() -> list[str]:
    """Return the directories of drop-in files, the most important directory first.

    If two directories have a file of the same name, only the file in the first of them is used.
    """
    if VARIABLE in os.environ:
        return [path for path in os.environ[VARIABLE].split(":") if path]
    if os.geteuid() == 0:
        # sudo may keep the user's HOME, and root must not apply the user's files.
        return list(SYSTEM)
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return [f"{home}/kprobefs/probes.d", *SYSTEM]


def files() -> list[Path]:
    """Return the drop-in files, sorted by name across all directories.

    A file that is a link to /dev/null is left out, and masks files of the same name in later directories.
    Mirrors: sysctl.d(5).
    """
    found: dict[str, Path] = {}
    for directory in directories():
        try:
            names = os.listdir(directory)
        except OSError:
            continue
        for name in names:
            if name.endswith(".probes"):
                found.setdefault(name, Path(directory, name))
    # A link to /dev/null masks the files of the same name in later directories.
    return [found[name] for name in sorted(found) if os.path.realpath(found[name]) != os.devnull]


@dataclass(frozen=True)
class Text:
    """The text of a file of definitions, and whether messages may show it."""

    text: str
    is_shown: bool = True
    """Whether messages may show lines of the file.

    True if all users can read the file, or if its path has no symbolic link.

    Through a link, another user could make this program show a file that only its user can read.
    """


def read(path: Path) -> Text:
    """Return the text of a drop-in file.

    Raises: CliError (the file cannot be read, or another user could have written it).
    """
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
                raise CliError(f"{path}: others could have written it; it isn't applied")
            return _text_of(file, path)
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}") from None


def read_definitions(path: str) -> Text:
    """Return the text of a file that the user has named on the command line. Raises: OSError."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        return Text(_decoded(read_named(path, LIMIT)))
    with open_regular(path) as file:
        return _text_of(file, path)


def _text_of(file: BinaryIO, path: str | Path) -> Text:
    is_public = os.fstat(file.fileno()).st_mode & stat.S_IROTH
    # Use the descriptor in place of the path, because a link in the path may have changed since the open.
    is_shown = is_public or os.readlink(f"/proc/self/fd/{file.fileno()}") == os.path.abspath(path)
    return Text(_decoded(read_open(file, LIMIT)), bool(is_shown))


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
