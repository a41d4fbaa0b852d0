"""mount.fuse.kprobefs: the helper that mount(8) runs for `mount -t fuse.kprobefs` and for fstab."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kprobefs.cli.main import main as program
from kprobefs.cli.parser import FLAGS, REFUSED_FLAGS, mount_parser
from kprobefs.common.errors import CliError, ExitStatus

USAGE = "usage: mount.fuse.kprobefs SOURCE DIR [-sfnv] [-o OPTION[=VALUE],...]"
WRONG_USAGE = 1
"""Exit status of mount(8) after wrong usage."""
FAILED = 32
"""Exit status of mount(8) after a failed mount."""
NOT_OURS = frozenset(
    """defaults rw auto noauto user nouser users nousers owner group nofail _netdev nodev nosuid exec async
    atime relatime norelatime strictatime diratime nodiratime lazytime nolazytime silent loud""".split()  # noqa: SIM905
)
"""Options that the helper ignores: mount(8) handles them itself, or they apply to every FUSE mount."""
USERSPACE = ("x-", "X-", "comment=")
"""Prefixes of options in fstab that are meant for other programs; the helper ignores the options."""


def arguments(words: Sequence[str]) -> list[str] | None:
    """Convert mount(8)'s arguments to those of `kprobefs mount`; return None for a fake mount (-f).

    Raises: ValueError (wrong usage, or an option that `kprobefs mount` does not have).
    """
    found: list[str] = []
    places: list[str] = []
    is_fake = False
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "-N":
            raise ValueError("-N: not supported; use nsenter -t PID -m mount ...")
        if word in ("-o", "-t"):
            if not left:
                raise ValueError(f"{word}: its value is missing; give {word} VALUE")
            value = left.pop(0)
            found += _options(value) if word == "-o" else []
        elif word.startswith("-") and word.strip("sfnv") == "-":
            is_fake |= "f" in word
        else:
            places.append(word)
    if len(places) != 2:
        raise ValueError(USAGE)
    return None if is_fake else ["mount", *found, "--", places[1]]


def _options(text: str) -> list[str]:
    """Convert `name=value,...` to options of `kprobefs mount`.

    Raises: ValueError (an option is unknown, or is one that FUSE mounts cannot have).
    """
    found = []
    for word in text.split(","):
        name, equals, value = word.partition("=")
        if word in FLAGS:
            found += ["-o", word]
        elif name in REFUSED_FLAGS:
            raise ValueError(f"-o {name}: {REFUSED_FLAGS[name]}")
        elif name and name not in NOT_OURS and not word.startswith(USERSPACE):
            option = f"--{name.replace('_', '-')}{equals}{value}"
            if _is_unknown(option):
                raise ValueError(f"-o {name}: no such option; see mount.fuse.kprobefs(8)")
            found.append(option)
    return found


def _is_unknown(option: str) -> bool:
    """Return True if `kprobefs mount` has no option called `option`. The command itself checks the values."""
    try:
        return bool(mount_parser().parse_known_args([option, "--", "/"])[1])
    except CliError:
        return False


def _without_defaults(words: Sequence[str]) -> list[str]:
    """Return the arguments without the options dev and suid, which mount.fuse(8) always adds."""
    source, directory, _, options = words
    kept = [word for word in options.split(",") if word not in ("dev", "suid")]
    return [source, directory, "-o", ",".join(kept)]


def main(of_mount_fuse: Sequence[str] | None = None) -> int:
    """Run the helper: mount, and return an exit status of mount(8) once the mount answers or has failed.

    `of_mount_fuse`: the arguments of mount.fuse(8), if that program is the caller; None: mount(8) is.
    """
    try:
        words = arguments(sys.argv[1:] if of_mount_fuse is None else _without_defaults(of_mount_fuse))
    except ValueError as error:
        print(f"mount.fuse.kprobefs: {error}", file=sys.stderr)
        return WRONG_USAGE
    status = ExitStatus.OK if words is None else program(words)
    return {ExitStatus.OK: 0, ExitStatus.USAGE: WRONG_USAGE}.get(ExitStatus(status), FAILED)
