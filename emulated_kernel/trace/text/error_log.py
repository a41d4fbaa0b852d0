"""The error_log file: why the last commands were refused, with a caret under the place."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from enum import Enum

from emulated_kernel.dataclass import dataclass
from emulated_kernel.errors import KernelError
from emulated_kernel.trace.text.chars import to_text

TRACING_LOG_ERRS_MAX = 8
_PREFIX = "  Command: "
_POSITION_MASK = 0xFFFF
"""Linux keeps the column in 16 bits."""


@dataclass(frozen=True)
class LoggedError:
    """An entry: time in ns, the subsystem, the error's text, the command, and the caret's byte column."""

    time: int
    location: str
    text: str
    command: str
    column: int

    def show(self) -> str:
        """Mirrors: kernel/trace/trace.c:tracing_err_log_seq_show (v6.1)."""
        seconds, rest = divmod(self.time, 1_000_000_000)
        head = f"[{seconds:5}.{rest // 1000:06}] {self.location}: error: {self.text}\n"
        return f"{head}{_PREFIX}{to_text(self.command)}\n{' ' * (len(_PREFIX) + self.column)}^\n"


class ErrorLog:
    """The last 8 errors, oldest first. `clock` gives ns."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._entries: deque[LoggedError] = deque(maxlen=TRACING_LOG_ERRS_MAX)

    def add(self, location: str, command: str, text: str, column: int) -> None:
        """Mirrors: kernel/trace/trace.c:tracing_log_err (v6.1)."""
        self._entries.append(LoggedError(self._clock(), location, text, command, column & _POSITION_MASK))

    def records(self) -> list[str]:
        """The text of each entry."""
        return [entry.show() for entry in self._entries]

    def clear(self) -> None:
        """Opening for writing with O_TRUNC."""
        self._entries.clear()


class CulpritLog:
    """A command that is parsed as a text; carets point at the first place in it that reads like the culprit.

    Mirrors: kernel/trace/trace_events_hist.c:last_cmd_set, errpos; trace_events_synth.c (v6.1).
    """

    def __init__(self, error_log: ErrorLog, location: str, command: str) -> None:
        self._error_log = error_log
        self._location = location
        self._command = command

    def error(self, error: Enum, culprit: str = "", code: int = errno.EINVAL) -> KernelError:
        """Log `error`, whose value is its text; the exception is for the caller to raise."""
        column = max(self._command.find(culprit), 0)
        self._error_log.add(self._location, self._command, error.value, column)
        return KernelError(code, error.value)
