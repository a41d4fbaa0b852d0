"""A hint at the end of `run` and `trace`: the kernel of the mount has panicked, or the mount is gone."""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from pathlib import Path

from emulated_kernel.util.lazy_pattern import lazy_pattern
from kprobefs.cli.nothing_hint import DISARMED
from kprobefs.common.mountpoints import STALE, STATE_LINK, MountState
from kprobefs.definitions.tracefs_files import control_root

PANICKED = "the guest has panicked: {why}"
GONE = "the mount is gone: it was unmounted, or its daemon has ended"
HINT_LINE = lazy_pattern(
    rf"kprobefs: ({re.escape(PANICKED).replace(re.escape('{why}'), '.*')}|{re.escape(GONE)})"
)
"""Pattern of the line with a hint that `run` and `trace` print; its group is the hint."""
_STAMP = lazy_pattern(r"^(?:<\d+>)?\[ *[0-9.]+\] ")
"""Pattern for the level, which not each kernel has, and the time at the start of a line of the kernel log."""


def ended_hint(directory: str) -> str:
    """Return a hint if the mount at `directory` has lost its kernel; "" if it has not.

    If the kernel has panicked, the hint names the last line of machine/dmesg as the reason.
    """
    try:
        state = os.readlink(Path(directory, STATE_LINK))
    except OSError as error:
        return GONE if error.errno in (errno.ENOENT, *STALE) else ""
    if state == MountState.PANICKED.value:
        with suppress(OSError):
            return PANICKED.format(why=last_logged_line(directory) or "its log is empty")
    return ""


def last_logged_line(directory: str) -> str:
    """Return the last line of machine/dmesg that is not blank, without its time, or "".

    A message that the kernel logs when disarm() disarms all probes does not count. Raises: OSError.
    """
    text = (control_root(directory) / "machine" / "dmesg").read_text(errors="replace")
    lines = (line for line in reversed(text.splitlines()) if line.strip() and DISARMED not in line)
    return _STAMP.sub("", next(lines, ""))
