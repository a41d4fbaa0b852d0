"""mount.fuse.kprobefs: what mount(8) runs for `mount -t fuse.kprobefs` and for lines of fstab."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kprobefs.cli.main import main as program
from kprobefs.cli.parser import FLAGS, mount_parser
from kprobefs.common.errors import CliError, ExitStatus

USAGE = "usage: mount.fuse.kprobefs SOURCE DIR [-sfnv] [-o OPTION[=VALUE],...]"
WRONG_USAGE, FAILED = 1, 32
"""Exit statuses of mount(8)."""
NOT_OURS = frozenset(
    """defaults rw auto noauto user nouser users nousers owner group nofail _netdev nodev nosuid exec async
    atime relatime norelatime strictatime diratime nodiratime lazytime nolazytime silent loud""".split()  # noqa: SIM905
)
"""Options that are mount(8)'s own, or that a mount of FUSE has anyhow."""
REFUSED = {
    "ro": "not possible, since the files are there to be written; restrict access by file modes",
    "suid": "not possible, since FUSE mounts are nosuid; leave it out",
    "dev": "not possible, since FUSE mounts are nodev; leave it out",
}
"""Options of mount(8) that a mount can't have, and why."""
USERSPACE = ("x-", "X-", "comment=")
"""How options begin that are for others to read in fstab."""


def arguments(words: Sequence[str]) -> list[str] | None:
    """The program's arguments for those of mount(8); None where nothing is to be done. Raises: ValueError."""
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
    """`name=value,...` as options of the program."""
    found = []
    for word in text.split(","):
        name, equals, value = word.partition("=")
        if word in FLAGS:
            found += ["-o", word]
        elif name in REFUSED:
            raise ValueError(f"-o {name}: {REFUSED[name]}")
        elif name and name not in NOT_OURS and not word.startswith(USERSPACE):
            option = f"--{name.replace('_', '-')}{equals}{value}"
            if _is_unknown(option):
                raise ValueError(f"-o {name}: no such option; see mount.fuse.kprobefs(8)")
            found.append(option)
    return found


def _is_unknown(option: str) -> bool:
    """Whether `kprobefs mount` has none of that name; wrong values it tells of itself."""
    try:
        return bool(mount_parser().parse_known_args([option, "--", "/"])[1])
    except CliError:
        return False


def _without_defaults(words: Sequence[str]) -> list[str]:
    """Without the two options that mount.fuse(8) adds by itself, and that no mount of ours has."""
    source, directory, _, options = words
    kept = [word for word in options.split(",") if word not in ("dev", "suid")]
    return [source, directory, "-o", ",".join(kept)]


def main(of_mount_fuse: Sequence[str] | None = None) -> int:
    """Mount, and return when the mount answers; the exit status is one of mount(8)'s.

    `of_mount_fuse`: what mount.fuse(8) gives instead of mount(8).
    """
    try:
        words = arguments(sys.argv[1:] if of_mount_fuse is None else _without_defaults(of_mount_fuse))
    except ValueError as error:
        print(f"mount.fuse.kprobefs: {error}", file=sys.stderr)
        return WRONG_USAGE
    status = ExitStatus.OK if words is None else program(words)
    return {ExitStatus.OK: 0, ExitStatus.USAGE: WRONG_USAGE}.get(ExitStatus(status), FAILED)
