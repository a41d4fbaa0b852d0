"""The error_log file: why the last commands failed, with a caret under the wrong part of each command."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

from emulated_kernel.trace.text.chars import to_text
from emulated_kernel.util.errors import KernelError

TRACING_LOG_ERRS_MAX = 8
"""Number of errors that error_log keeps."""
_PREFIX = "  Command: "
_POSITION_MASK = 0xFFFF
"""Mask of a column. Linux: the column has 16 bits."""


class ErrorLog:
    """The last 8 errors, the oldest first. `clock` returns nanoseconds."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._entries: deque[str] = deque(maxlen=TRACING_LOG_ERRS_MAX)

    def add(self, location: str, command: str, text: str, column: int) -> None:
        """Add an error of a command: its `text`, and the column in bytes of the caret in the command.

        Mirrors: kernel/trace/trace.c:tracing_log_err, tracing_err_log_seq_show (v6.1).
        """
        seconds, rest = divmod(self._clock(), 1_000_000_000)
        head = f"[{seconds:5}.{rest // 1000:06}] {location}: error: {text}\n"
        caret = f"{' ' * (len(_PREFIX) + (column & _POSITION_MASK))}^\n"
        self._entries.append(f"{head}{_PREFIX}{to_text(command)}\n{caret}")

    def records(self) -> list[str]:
        """Return the text of each error, the oldest first."""
        return list(self._entries)

    def clear(self) -> None:
        """Forget all errors, as opening the file for writing with O_TRUNC does."""
        self._entries.clear()


class LastCommandLog:
    """Log of the errors of one command, which is stored as one text.

    The caret of an error points at the first occurrence of the wrong text in the command.

    Mirrors: kernel/trace/trace_events_hist.c:last_cmd_set, errpos; trace_events_synth.c (v6.1).
    """

    def __init__(self, error_log: ErrorLog, location: str, command: str) -> None:
        self._error_log = error_log
        self._location = location
        self._command = command

    def error(self, error: Enum, culprit: str = "", code: int = errno.EINVAL) -> KernelError:
        """Log `error`, whose value is its text, and return the exception that the caller raises.

        `culprit` is the wrong text in the command.
        """
        column = max(self._command.find(culprit), 0)
        self._error_log.add(self._location, self._command, error.value, column)
        return KernelError(code, error.value)

    @contextmanager
    def instead(self, error: Enum, culprit: str = "") -> Iterator[None]:
        """If the `with` block raises a KernelError, log and raise `error` instead, with its errno."""
        try:
            yield
        except KernelError as failure:
            raise self.error(error, culprit, failure.errno) from None
