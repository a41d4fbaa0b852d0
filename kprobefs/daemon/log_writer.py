"""LogWriter: a logging handler that never makes the logging thread wait, even if writing the log blocks."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from contextlib import suppress
from time import monotonic

from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.threads import start_thread

MAX_BYTES = 1 << 20
"""Maximum size in bytes of all messages that wait to be written. Further messages are dropped and counted."""
FLUSH_TIMEOUT = 1.0
"""Maximum seconds that flush() waits until the messages are written."""


class LogWriter(logging.Handler):
    """Queues log messages. A thread writes the queued messages to a descriptor.

    A write to the descriptor can block: it may be a pipe without a reader, a stopped terminal, or a file on a
    hung disk. Then only the writing thread waits. The descriptor stays blocking: other processes may have
    inherited it, and O_NONBLOCK would apply to them, too.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        """Discard all queued messages, and forget the writing thread.

        A forked child calls this, because the thread runs only in the parent.
        """
        self._changed = threading.Condition()
        self._messages: deque[bytes] = deque()
        self._size = 0
        self._dropped = 0
        self._is_writing = False
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the message of a record.

        If no thread can be started to write the queue, try again with the next record.
        """
        try:
            message = f"{self.format(record)}\n".encode("utf-8", "surrogateescape")
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            if self._messages and self._size + len(message) > MAX_BYTES:
                self._dropped += 1
                return
            self._messages.append(message)
            self._size += len(message)
            self._changed.notify_all()
            if self._thread is None:
                with suppress(KernelError):
                    self._thread = start_thread("log", self._write_for_ever)

    def _write_for_ever(self) -> None:
        while True:
            with self._changed:
                while not self._messages:
                    self._changed.wait()
                message = self._messages.popleft()
                self._size -= len(message)
                if self._dropped and not self._messages:
                    message += (
                        f"{self._dropped} messages were dropped: the log took none meanwhile\n".encode()
                    )
                    self._dropped = 0
                self._is_writing = True
            self._write(message)
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()

    def _write(self, message: bytes) -> None:
        while message:
            try:
                message = message[os.write(self._descriptor, message) :]
            except OSError:
                # The reader is gone, or the disk is full.
                with self._changed:
                    self._dropped += 1
                return

    def flush(self) -> None:
        """Wait until all messages are written, for at most FLUSH_TIMEOUT seconds."""
        end = monotonic() + FLUSH_TIMEOUT
        with self._changed:
            while (self._messages or self._is_writing) and self._thread is not None:
                if not self._changed.wait(end - monotonic()):
                    return


def flush_log() -> None:
    """Wait until the program's log messages are written, for at most FLUSH_TIMEOUT seconds."""
    for handler in logging.getLogger().handlers:
        handler.flush()
