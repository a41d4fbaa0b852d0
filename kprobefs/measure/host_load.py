"""HostLoad: other activity of the host during a measurement, for a line below the table of results."""

from __future__ import annotations

import os
from pathlib import Path

_STAT = Path("/proc/stat")
_STEAL = 7
"""Index of the stolen time among the times of a line of /proc/stat.

The later times are left out, because they are parts of earlier ones.
"""


class HostLoad:
    """The host's load average at the object's creation and now, and the CPU time stolen in between."""

    def __init__(self) -> None:
        self._load = os.getloadavg()[0]
        self._times = _cpu_times()

    def line(self) -> str:
        """Return a line: the loads at the start and now, and the share of CPU time that a hypervisor took.

        The share is left out if there is no /proc/stat.
        """
        text = f"host: load {self._load:.2f} at the start, {os.getloadavg()[0]:.2f} at the end"
        passed = [now - before for now, before in zip(_cpu_times(), self._times, strict=True)]
        if not passed:
            return text
        return f"{text}; {100 * passed[_STEAL] / max(1, sum(passed)):.1f} % of CPU time stolen"


def _cpu_times() -> list[int]:
    """Return the times user to steal of /proc/stat, in clock ticks; [] if there is no /proc/stat.

    Each time is the sum over all CPUs.
    """
    try:
        first, _, _ = _STAT.read_text(encoding="ascii").partition("\n")
    except OSError:
        return []
    return [int(word) for word in first.split()[1 : _STEAL + 2]]
