"""Where the files of a mount are in the guest."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

from emulated_kernel.guests.linux.initramfs import DEBUGFS, DEVICES, PROC, TMPFS, TRACEFS

LINKED = ("/kprobe_events", "/kprobe_profile")
"""Files of tracefs that the root shows too."""
MACHINE = "/machine"
DMESG = "/machine/dmesg"
MODULES = "/machine/modules"
FORWARDED = {f"{MACHINE}/{name}": f"{PROC}/{name}" for name in ("kallsyms", "meminfo", "modules", "version")}
TOPS = {"tracing": TRACEFS, "scratch": TMPFS, "sysctl": f"{PROC}/sys", "dev": DEVICES}
"""Directories of the root that aren't debugfs's."""
PATHS = 500
"""Paths; nobody has many in use at once."""


class GuestPath(NamedTuple):
    """What a path of a mount leads to."""

    at: str
    """In the guest."""
    is_machine: bool = False
    """It isn't the guest's."""
    takes_commands: bool = False
    """Writes to it are none of the guest's file's."""


def guest_paths(*, is_tracefs: bool) -> Callable[[str], GuestPath]:
    """What tells it of each path. `is_tracefs`: tracefs is the mount's root, and all that there is."""
    return lru_cache(PATHS)(partial(_guest_path, is_tracefs=is_tracefs))


def _guest_path(path: str, *, is_tracefs: bool) -> GuestPath:
    if is_tracefs or path in LINKED:
        return GuestPath((TRACEFS + path).rstrip("/"))
    if path in FORWARDED:
        return GuestPath(FORWARDED[path], takes_commands=path == MODULES)
    top, _, rest = path[1:].partition("/")
    at = f"{TOPS[top]}/{rest}" if top in TOPS else DEBUGFS + path
    return GuestPath(at.rstrip("/"), is_machine=top == MACHINE[1:])
