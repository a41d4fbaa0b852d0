"""Wake: what the daemon's main thread waits for: the end, and processes that have something to say."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from selectors import EVENT_READ, PollSelector

Handler = Callable[[], None]


class Wake:
    """An event that a signal handler may set, for the main thread to wait for; there is one in a process.

    A handler runs when the main thread runs Python again. A wait for a lock goes on if the signal came just
    before it, or to another thread. A wait for a pipe is ended by the byte that the interpreter writes then.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # Unlike epoll's, it needs no descriptor of its own.
        self._selector = PollSelector()
        self._selector.register(self._reader, EVENT_READ, self._drain)

    def is_set(self) -> bool:
        """Whether it has been set."""
        return self._is_set

    def set(self) -> None:
        """Set it, from any thread."""
        self._is_set = True
        with suppress(BlockingIOError):
            os.write(self._writer, b"\0")

    def watch(self, descriptor: int, handler: Handler) -> None:
        """Have wait() return `handler` when the descriptor can be read."""
        self._selector.register(descriptor, EVENT_READ, handler)

    def ignore(self, descriptor: int) -> None:
        """Watch a descriptor no more."""
        self._selector.unregister(descriptor)

    def wait(self, timeout: float | None = None) -> list[Handler]:
        """Wait until it is set, for `timeout` seconds, or until a watched descriptor can be read.

        Return the handlers of the descriptors that can be read. Only for the main thread.
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
