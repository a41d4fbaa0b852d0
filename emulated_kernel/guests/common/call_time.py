"""CallTime: limits the CPU time of the host that one call of a guest may use."""

from __future__ import annotations

from time import monotonic, thread_time

from emulated_kernel.machine.run_watchdog import HandlerTime

MAX_CALL = 10.0
"""Maximum CPU seconds of one call of a guest, including the time that other tasks run during the call.

After half of this time, most of the CPU time of probe handlers does not count; see HandlerTime.
"""
LOOK = 0.25
"""Minimum seconds between two measurements of the CPU time."""


class CallTime:
    """Limits the CPU time that the calling thread uses for one call of a guest.

    The CPU time is read at most once in LOOK seconds of real time, because reading it is a system call of the
    host.
    """

    def __init__(self, handlers: HandlerTime, limit: float) -> None:
        """Create a limit for successive calls, and begin to measure the first one.

        `handlers`: the CPU time of probe handlers; see MAX_CALL. `limit`: maximum CPU seconds of a call.
        """
        self._handlers = handlers
        self.limit = limit
        self.begin()

    def begin(self) -> None:
        """Begin to measure a call. CPU time in its first LOOK seconds does not count."""
        self._handlers.is_continued = False
        self._since: float | None = None
        self._next_look = monotonic() + LOOK

    def is_over(self) -> bool:
        """Return True if the call is known to have used more CPU time than the limit.

        Return False also if the last measurement is less than LOOK seconds ago.
        """
        now = monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK
        cpu = thread_time()
        if self._since is None:
            self._since = cpu
        used = cpu - self._since
        handlers = self._handlers
        if used <= self.limit / 2:
            return False
        if not handlers.is_continued:
            handlers.keep_measuring()
        return used - handlers.kept > self.limit
