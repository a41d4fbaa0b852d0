"""`kprobefs install-service`: write the systemd units with the path of this program."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from importlib import resources
from pathlib import Path

from kprobefs.common.errors import CliError
from kprobefs.common.output_file import OutputFile

PROGRAM = "/usr/bin/kprobefs"
"""Path of the program in the shipped unit files; install() replaces it by this program's command."""
SYSTEM_UNITS = ("kprobefs.service", "kprobefs@.service")
"""Files of units for the system's service manager."""
USER_UNITS = ("user/kprobefs.service",)
"""Files of units for a user's service manager."""


def install(root: str, *, user: bool) -> list[str]:
    """Write the units below `root`, and reload the running service manager if `root` is /.

    Return messages about the changes, and about commands that enable the service. Raises: CliError (the
    directory is not writable, or the unit files are missing), OSError (a file cannot be written). `user`:
    write the units for a user's service manager instead of the system's.
    """
    is_here = root == "/"
    if user and not is_here:
        # A package or an image has no current user, so its user units are for all users.
        directory = Path(root, "etc/systemd/user")
    elif user:
        config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
        directory = Path(config, "systemd/user")
    else:
        directory = Path(root, "etc/systemd/system")
    done = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _check_writable(directory)
    except OSError as error:
        way = "; use --user, or run as root" if isinstance(error, PermissionError) and not user else ""
        raise CliError(f"{directory}: {error.strerror}{way}") from None
    units = {directory / Path(unit).name: unit for unit in (USER_UNITS if user else SYSTEM_UNITS)}
    with ExitStack() as stack:
        files = [(path, stack.enter_context(OutputFile(path))) for path in units]
        for path, file in files:
            text = _units().joinpath(units[path]).read_text("utf-8")
            file.write(text.replace(f"={PROGRAM} ", f"={_program()} ").encode())
            done.append(f"wrote {path}")
    scope = ["--user"] if user else []
    systemctl = " ".join(["systemctl", *scope])
    if not is_here:
        return [*done, f"enable it: systemctl {'--global ' if user else ''}--root={root} enable kprobefs"]
    if shutil.which("systemctl") and os.path.isdir("/run/systemd/system"):
        result = subprocess.run(["systemctl", *scope, "daemon-reload"], capture_output=True, check=False)
        done += [] if result.returncode == 0 else [f"next: {systemctl} daemon-reload"]
    return [*done, f"start it: {systemctl} enable --now kprobefs"]


def _check_writable(directory: Path) -> None:
    """Check that the directory is writable. Raises: OSError (EROFS or EACCES)."""
    if not os.access(directory, os.W_OK):
        why = errno.EROFS if os.statvfs(directory).f_flag & os.ST_RDONLY else errno.EACCES
        raise OSError(why, os.strerror(why))


def _units() -> Path:
    """Return the directory of the unit files: in the package or, in a checkout, next to the package.

    Raises: CliError (there are no unit files).
    """
    package = Path(str(resources.files("kprobefs")))
    for directory in (package / "systemd", package.parent / "systemd"):
        if (directory / SYSTEM_UNITS[0]).exists():
            return directory
    raise CliError("systemd units: missing from this installation; install kprobefs again")


def _program() -> str:
    """Return the command with which a unit starts this program, quoted for systemd."""
    path = os.path.abspath(sys.argv[0])
    if os.path.basename(path) == "kprobefs" and os.access(path, os.X_OK):
        return _quoted(path)
    return f"{_quoted(sys.executable)} -P -m kprobefs"


def _quoted(path: str) -> str:
    """Return `path` quoted as a word of a unit file. Mirrors: systemd.syntax(7)."""
    escaped = path.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if any(character in " \t'\"\\;" for character in path) else escaped
