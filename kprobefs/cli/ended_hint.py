"""A hint at the end of `run` and `trace`: the kernel of the mount has panicked, or the mount is gone."""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from pathlib import Path

from emulated_kernel.util.lazy_pattern import lazy_pattern
from kprobefs.common.mountpoints import STALE, STATE_LINK, MountState
from kprobefs.definitions.tracefs_files import control_root

PANICKED = "the guest has panicked: {why}"
GONE = "the mount is gone: it was unmounted, or its daemon has ended"
HINT_LINE = lazy_pattern(
    rf"kprobefs: ({re.escape(PANICKED).replace(re.escape('{why}'), '.*')}|{re.escape(GONE)})"
)
"""Pattern of the line with a hint that `run` and `trace` print; its group is the hint."""
_STAMP = lazy_pattern(r"^\[ *[0-9.]+\] ")
"""Pattern for the time at the start of a line of the kernel log."""


def ended_hint(directory: str) -> str:
    """Return a hint if the mount at `directory` has lost its kernel; "" if it has not.

    If the kernel has panicked, the hint names the last line of machine/dmesg as the reason.
    """
    try:
        state = os.readlink(Path(directory, STATE_LINK))
    except OSError as error:
        return GONE if error.errno in (errno.ENOENT, *STALE) else ""
    with suppress(OSError):
        if state == MountState.PANICKED.value:
            text = (control_root(directory) / "machine" / "dmesg").read_text(errors="replace")
            last = ["its log is empty", *filter(str.strip, text.splitlines())][-1]
            return PANICKED.format(why=_STAMP.sub("", last))
    return ""
