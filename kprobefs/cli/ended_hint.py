"""A hint at the end of `run` and `trace`: the kernel of the mount has panicked, or the mount is gone."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from emulated_kernel.machine.guest_info import GIVEN_UP, HOST_NOTE
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
"""Pattern for the start of a line of the kernel log: a level, which some kernels omit, and the time."""


def ended_hint(directory: str) -> str:
    """Return a hint if the kernel of the mount at `directory` has panicked, or the mount is gone; else "".

    The hint about a panic has the reason from machine/dmesg.
    """
    try:
        state = os.readlink(Path(directory, STATE_LINK))
    except OSError as error:
        return GONE if error.errno in (errno.ENOENT, *STALE) else ""
    if state == MountState.PANICKED.value:
        with suppress(OSError):
            return PANICKED.format(why=_reason(_logged_lines(directory)))
    return ""


def _reason(lines: Sequence[str]) -> str:
    """Return the line of the kernel log that says why the kernel has panicked.

    `lines`: the log. The returned line is the host's message that it has ended the guest, with the reason. If
    there is none, it is the last line that the guest has logged, or else the last line of all. If the log is
    empty, return a text that says so.
    """
    own = [line for line in lines if not line.startswith(HOST_NOTE)]
    given_up = [line for line in lines if line.startswith(GIVEN_UP)]
    return ["its log is empty", *lines[-1:], *own[-1:], *given_up[-1:]][-1]


def last_logged_line(directory: str) -> str:
    """Return the last line of the kernel log, without its level and time; "" if there is none.

    Lines that _logged_lines() omits do not count. Raises: OSError.
    """
    return next(reversed(_logged_lines(directory)), "")


def _logged_lines(directory: str) -> list[str]:
    """Return the lines of machine/dmesg that are not blank, without their levels and times.

    The kernel's message that all probes are disarmed is left out, because nothing_hint.disarm() causes it.
    Raises: OSError.
    """
    text = (control_root(directory) / "machine" / "dmesg").read_text(errors="replace")
    lines = (line for line in text.splitlines() if line.strip() and DISARMED not in line)
    return [_STAMP.sub("", line) for line in lines]
