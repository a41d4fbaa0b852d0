"""The error_log file: why the last commands were refused, with a caret under the place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from emulated_kernel.dataclass import dataclass
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

    def show(self) -> str:
        """The file's text."""
        return "".join(self.records())

    def clear(self) -> None:
        """Opening for writing with O_TRUNC."""
        self._entries.clear()
