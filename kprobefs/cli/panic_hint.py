"""A hint at the end of `run` and `trace`: the kernel of the mount has panicked, and why."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from emulated_kernel.util.lazy_pattern import lazy_pattern
from kprobefs.common.mountpoints import STATE_LINK, MountState
from kprobefs.definitions.tracefs_files import control_root

HINT = "the guest has panicked: {why}"
HINT_LINE = lazy_pattern("kprobefs: (" + re.escape(HINT).replace(re.escape("{why}"), ".*") + ")")
"""Pattern of the line with a hint that `run` and `trace` print; its group is the hint."""
_STAMP = lazy_pattern(r"^\[ *[0-9.]+\] ")
"""Pattern for the time at the start of a line of the kernel log."""


def panic_hint(directory: str) -> str:
    """Return a hint if the kernel of the mount at `directory` has panicked; "" if it has not.

    The hint names the last line of machine/dmesg as the reason.
    """
    with suppress(OSError):
        if os.readlink(Path(directory, STATE_LINK)) == MountState.PANICKED.value:
            text = (control_root(directory) / "machine" / "dmesg").read_text(errors="replace")
            last = ["its log is empty", *filter(str.strip, text.splitlines())][-1]
            return HINT.format(why=_STAMP.sub("", last))
    return ""
