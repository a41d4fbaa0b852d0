"""ReadTurns: lets one thread read requests. If it is busy for long, another thread reads in its place."""

from __future__ import annotations

import os
import threading

BUSY = 0.01
"""Seconds after which another thread reads the next request, if a thread is still answering one."""
LOOK = 256
"""Number of requests of a thread between two looks at the host's load; a power of two.

A look takes 3 us.
"""
CPUS = os.cpu_count() or 1


class Reader:
    """A thread that reads requests, when it has the turn. Only this thread changes the attributes."""

    __slots__ = ("is_busy", "requests", "thread")

    def __init__(self) -> None:
        """Create the object for the calling thread."""
        self.thread = threading.get_ident()
        self.requests = 0
        """Number of requests that the thread has read."""
        self.is_busy = False
        """Whether the thread answers a request, so that it does not read the next one."""


class ReadTurns:
    """Lets one thread at a time read requests from /dev/fuse: the thread that has the turn.

    The thread with the turn reads the next request when it has answered the last one. Most requests take less
    than BUSY seconds. With several readers, the host's kernel would wake another thread at each request. That
    thread would compete for Python's global lock with the thread that has just answered.

    One of the threads without the turn is the successor. If the thread with the turn is busy with one request
    for BUSY seconds, the successor takes the turn. While requests arrive, the successor wakes every BUSY
    seconds. While no request arrives, it sleeps until the next request, so that an idle daemon uses no CPU
    time.
    Hazard: a thread that has lost the turn may still read one request. This has no effect on other threads.

    If the host has more runnable tasks than CPUs, all threads read. The host's scheduler gives each thread a
    share of the CPUs, and the share of one thread is then too small for many requests.
    """

    def __init__(self, wake: threading.Event | None = None) -> None:
        """Create the object. No thread has the turn yet. `wake`: event in place of a new one, for tests."""
        self.reader: Reader | None = None
        """The thread with the turn; None if that thread has given it up."""
        self._succession = threading.Lock()
        """Held by the successor; the other threads wait for the lock."""
        self.is_parked = False
        """Whether the successor sleeps until wake() is called."""
        self.is_shared = False
        """Whether all threads read, because the host is busy."""
        self._wake = wake or threading.Event()
        """Set when the successor must not sleep any longer."""

    # Before a thread reads a request, it calls await_turn() if it is not `reader`. Then it calls wake() if
    # `is_parked` is set. Two calls for each request would take 1 % of the time of an open, read and close.

    def await_turn(self, reader: Reader) -> None:
        """Wait until the calling thread, `reader`, has the turn."""
        with self._succession:
            while not self._is_vacant():
                pass
            self.reader = reader

    def look_at_load(self) -> None:
        """Check the host's load: if it is high, let all threads read, else only the one with the turn."""
        self.is_shared = os.getloadavg()[0] > CPUS
        if self.is_shared:
            self._wake.set()

    def wake(self) -> None:
        """Wake the successor, which then measures how long the calling thread takes for its request."""
        self._wake.set()

    def give_up(self) -> None:
        """If the calling thread has the turn, give up the turn, so that another thread reads requests.

        The calling thread is about to end, or to wait while it answers a request.
        """
        if self.reader is not None and self.reader.thread == threading.get_ident():
            self.reader = None
            self._wake.set()

    def _is_vacant(self) -> bool:
        """Return True if the successor takes the turn now; if False, call this again.

        If the turn is free or if all threads read, return True at once. Otherwise, wait BUSY seconds, and
        return True if the thread with the turn was busy with one request all this time. If that thread has
        received no request meanwhile, wait for its next one. Then return False.
        """
        self._wake.clear()
        reader = self.reader
        if reader is None or self.is_shared:
            return True
        requests = reader.requests
        self._wake.wait(BUSY)
        if self.reader is not reader or reader.requests != requests:
            return False
        if reader.is_busy:
            return True
        # Order matters: the other threads change their state before they look at is_parked or set _wake.
        self.is_parked = True
        if not reader.is_busy and self.reader is reader:
            self._wake.wait()
        self.is_parked = False
        return False
