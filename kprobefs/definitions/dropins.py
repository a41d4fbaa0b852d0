"""Definitions that a mount begins with: *.probes in directories of the system's and of the user's."""

from __future__ import annotations

import os
from pathlib import Path

from emulated_kernel.util.safe_read import open_regular, read_open
from kprobefs.common.errors import CliError

SYSTEM = ("/etc/kprobefs/probes.d", "/run/kprobefs/probes.d", "/usr/lib/kprobefs/probes.d")
VARIABLE = "KPROBEFS_PROBES_PATH"
LIMIT = 64 << 20
"""Bytes of a file of definitions."""


def directories() -> list[str]:
    """Where they are looked for; of two files of the same name the one in the earlier directory counts."""
    if VARIABLE in os.environ:
        return [path for path in os.environ[VARIABLE].split(":") if path]
    if os.geteuid() == 0:
        # sudo may leave the user's HOME: what is there isn't root's to apply.
        return list(SYSTEM)
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return [f"{home}/kprobefs/probes.d", *SYSTEM]


def files() -> list[Path]:
    """In the order of their names, whatever their directory. Mirrors: sysctl.d(5)."""
    found: dict[str, Path] = {}
    for directory in directories():
        try:
            names = os.listdir(directory)
        except OSError:
            continue
        for name in names:
            if name.endswith(".probes"):
                found.setdefault(name, Path(directory, name))
    # A link to /dev/null hides the files of that name.
    return [found[name] for name in sorted(found) if os.path.realpath(found[name]) != os.devnull]


def read(path: Path) -> str:
    """What a file holds. Raises: CliError (it can't be read, or somebody else could have written it)."""
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
                raise CliError(f"{path}: others could have written it; it isn't applied")
            return read_open(file, LIMIT).decode("utf-8", "surrogateescape")
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}") from None
