"""Wake: an event for which the daemon's main thread waits, together with output of child processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from selectors import EVENT_READ, PollSelector

Handler = Callable[[], None]


class Wake:
    """An event for which the main thread waits, and which signal handlers may set.

    A process has one such event. Python runs a signal handler only when the main thread executes Python
    code. If a signal came just before the wait, or arrived in another thread, a threading.Event would
    continue to wait. Here the main thread waits for a pipe, to which the interpreter writes a byte at each
    signal.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # Unlike epoll, poll needs no descriptor of its own.
        self._selector = PollSelector()
        self._selector.register(self._reader, EVENT_READ, self._drain)

    def is_set(self) -> bool:
        """Return True if the event has been set."""
        return self._is_set

    def set(self) -> None:
        """Set the event. Any thread may call this."""
        self._is_set = True
        with suppress(BlockingIOError):
            os.write(self._writer, b"\0")

    def watch(self, descriptor: int, handler: Handler) -> None:
        """Watch a descriptor, so that wait() returns `handler` when the descriptor can be read."""
        self._selector.register(descriptor, EVENT_READ, handler)

    def ignore(self, descriptor: int) -> None:
        """Stop watching a descriptor."""
        self._selector.unregister(descriptor)

    def wait(self, timeout: float | None = None) -> list[Handler]:
        """Wait until the event is set, `timeout` seconds have passed, or a watched descriptor can be read.

        Return the handlers of the descriptors that can be read. Only the main thread may call this.
        """
        while not self._is_set:
            found: list[Handler] = [key.data for key, _ in self._selector.select(timeout)]
            if self._drain in found:
                self._drain()
            elif found or timeout is not None:
                return found
        return []

    def _drain(self) -> None:
        os.read(self._reader, 64)
