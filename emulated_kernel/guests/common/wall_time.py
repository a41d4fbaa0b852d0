"""Times of the guest's files as wall time, though the guest's own clock may be virtual and start at 0."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable
from time import time_ns

GRANULARITY_NS = 1_000_000
"""How far what is shown may be behind the wall clock, in nanoseconds."""
MAX_MOMENTS = 1 << 16
"""Beyond this many, every other one is forgotten."""
EXPLICIT_NS = (1 << 33) * 1_000_000_000
"""Added to times that a process set: which distinguishes them from the clock's; nanoseconds."""
_LATEST_CLOCK = EXPLICIT_NS // 2 - 1
"""What the guest's clock says at most."""
LATEST_NS = ((1 << 63) - 1) * 1_000_000_000
"""The guest counts seconds in 64 bits."""


class WallTime:
    """Remembers what the wall clock said at moments of the guest's time.

    So files show when they were written, while a guest that never sees the wall clock stays the same
    from run to run. Times that utimensat(2) sets lie in a range of their own and are kept exactly.
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        """`now_ns`: the guest's time as its files get it, which never goes back; a wild one's is anything."""
        self._guest_ns = now_ns
        self._guest = array("q", [0])
        self._wall = array("q", [time_ns() - min(self._guest_ns(), _LATEST_CLOCK)])

    def remember(self) -> None:
        """Call it before the guest does something that it may note the time of."""
        wall = time_ns()
        guest = min(self._guest_ns(), _LATEST_CLOCK)
        # The guest's time may also be the faster one: files of a later moment mustn't look older.
        if 0 <= wall - self._wall[-1] - guest + self._guest[-1] < GRANULARITY_NS:
            return
        if guest == self._guest[-1]:
            self._wall[-1] = wall
            return
        self._guest.append(guest)
        self._wall.append(wall)
        if len(self._guest) > MAX_MOMENTS:
            self._guest, self._wall = self._guest[::2], self._wall[::2]

    def to_wall(self, guest_ns: int) -> int:
        """A file's time of the guest, in nanoseconds since the epoch."""
        if guest_ns >= EXPLICIT_NS // 2:
            return guest_ns - EXPLICIT_NS
        at = max(bisect_right(self._guest, guest_ns) - 1, 0)
        return self._wall[at] + guest_ns - self._guest[at]

    @staticmethod
    def to_guest(wall_ns: int) -> int:
        """What the guest keeps for a time that a process sets, or the next one that it can keep.

        Mirrors: fs/inode.c:timestamp_truncate (v6.1)
        """
        return min(max(wall_ns + EXPLICIT_NS, EXPLICIT_NS // 2), LATEST_NS)
