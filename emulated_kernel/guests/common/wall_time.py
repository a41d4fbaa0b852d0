"""WallTime: converts times of the guest's files to wall time; the guest's own clock may be virtual."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable
from time import time_ns

GRANULARITY_NS = 1_000_000
"""Maximum nanoseconds by which a file's time may be earlier than the wall clock."""
MAX_MOMENTS = 1 << 16
"""Maximum number of pairs of guest time and wall time that are kept. If there are more, half are dropped."""
EXPLICIT_NS = (1 << 33) * 1_000_000_000
"""Nanoseconds that are added to times which a process sets, so that they differ from the clock's times."""
_LATEST_CLOCK = EXPLICIT_NS // 2 - 1
"""Latest time of the guest's clock in nanoseconds; later times are treated as this time."""
LATEST_NS = ((1 << 63) - 1) * 1_000_000_000
"""Latest time that the guest can store, in nanoseconds; the guest counts seconds in 64 bits."""


class WallTime:
    """Converts the guest's times to wall times, by the pairs (guest time, wall time) that remember() stores.

    Files show the wall time at which they were written. The guest itself never sees the wall clock, so it
    behaves the same in every run. Times that utimensat(2) sets are in a separate range and are kept exactly.
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        """Create a converter that knows one pair of times: the current guest time and wall time.

        `now_ns`: function that returns the guest's time, from which the guest's files get their times. The
        guest's time never goes back. If the guest's memory is corrupted, the time can have any value.
        """
        self._guest_ns = now_ns
        self._guest = array("q", [0])
        self._wall = array("q", [time_ns() - min(self._guest_ns(), _LATEST_CLOCK)])

    def remember(self) -> None:
        """Remember the current guest time and wall time.

        Call this before the guest may give a file a timestamp.
        """
        wall = time_ns()
        guest = min(self._guest_ns(), _LATEST_CLOCK)
        # The guest's time may run faster than the wall clock. Files of a later moment must not look older.
        if 0 <= wall - self._wall[-1] - guest + self._guest[-1] < GRANULARITY_NS:
            return
        if guest == self._guest[-1]:
            self._wall[-1] = wall
            return
        self._guest.append(guest)
        self._wall.append(wall)
        if len(self._guest) > MAX_MOMENTS:
            self._guest = self._guest[::2]
            self._wall = self._wall[::2]

    def to_wall(self, guest_ns: int) -> int:
        """Return the wall time of a guest's file timestamp, in nanoseconds since 1970."""
        if guest_ns >= EXPLICIT_NS // 2:
            return guest_ns - EXPLICIT_NS
        at = max(bisect_right(self._guest, guest_ns) - 1, 0)
        return self._wall[at] + guest_ns - self._guest[at]

    @staticmethod
    def to_guest(wall_ns: int) -> int:
        """Return the timestamp that the guest stores for a time that a process sets on a file.

        Times that the guest cannot store are replaced by the nearest time that it can store.

        Mirrors: fs/inode.c:timestamp_truncate (v6.1).
        """
        return min(max(wall_ns + EXPLICIT_NS, EXPLICIT_NS // 2), LATEST_NS)
