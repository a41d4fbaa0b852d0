"""The error_log file: errors of the last commands, with a caret under the wrong part of each command."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from types import MappingProxyType
from typing import Self

from emulated_kernel.trace.text.chars import to_text
from emulated_kernel.util.errors import KernelError

TRACING_LOG_ERRS_MAX = 8
"""Maximum number of errors that error_log keeps."""
_PREFIX = "  Command: "
_POSITION_MASK = 0xFFFF
"""Mask of a column, which has 16 bits as in Linux."""


class CommandError(Enum):
    """Base class of the errors of commands.

    A member identifies an error, whose text may differ between kernels. Tools match the texts, so they are an
    interface.
    """

    texts: tuple[str, ...]
    """The texts that kernels have for the error; the first is that of Linux 6.1, if this version has one."""

    def __new__(cls, *texts: str) -> Self:
        member = object.__new__(cls)
        member._value_ = len(cls.__members__)
        member.texts = texts
        return member


ErrorTexts = Mapping[CommandError, str]
"""Error -> its text in one kernel, for the errors whose text is not the first one of CommandError.texts."""


class ErrorLog:
    """The last 8 errors of commands, the oldest first."""

    def __init__(
        self, clock: Callable[[], int], texts: ErrorTexts = MappingProxyType[CommandError, str]({})
    ) -> None:
        """Create an empty log. `clock` returns the time in nanoseconds.

        `texts`: the texts of those errors for which this kernel does not use the first text in
        CommandError.texts.
        """
        self._clock = clock
        self._texts = texts
        self._entries: deque[str] = deque(maxlen=TRACING_LOG_ERRS_MAX)

    def text_of(self, error: CommandError) -> str:
        """Return this kernel's text for an error."""
        return self._texts.get(error, error.texts[0])

    def add(self, location: str, command: str, error: CommandError, column: int) -> None:
        """Add an error of a command. The caret of the error points at byte `column` of the command.

        `location` is the part of tracing that reports the error, such as `trace_kprobe`.
        Mirrors: kernel/trace/trace.c:tracing_log_err, tracing_err_log_seq_show (v6.1).
        """
        seconds, rest = divmod(self._clock(), 1_000_000_000)
        head = f"[{seconds:5}.{rest // 1000:06}] {location}: error: {self.text_of(error)}\n"
        caret = f"{' ' * (len(_PREFIX) + (column & _POSITION_MASK))}^\n"
        self._entries.append(f"{head}{_PREFIX}{to_text(command)}\n{caret}")

    def records(self) -> list[str]:
        """Return the text of each error, the oldest first."""
        return list(self._entries)

    def clear(self) -> None:
        """Forget all errors, as opening the file for writing with O_TRUNC does."""
        self._entries.clear()


class LastCommandLog:
    """Adds the errors of one command to error_log. The command is given as one string, not as words.

    The caret of an error points at the first occurrence of the wrong text in the command.

    Mirrors: kernel/trace/trace_events_hist.c:last_cmd_set, errpos; trace_events_synth.c (v6.1).
    """

    def __init__(self, error_log: ErrorLog, location: str, command: str) -> None:
        self._error_log = error_log
        self._location = location
        self._command = command

    def error(self, error: CommandError, culprit: str = "", code: int = errno.EINVAL) -> KernelError:
        """Log `error`, and return the exception that the caller raises.

        `culprit` is the wrong text in the command; if it is "" or not found, the caret points at the
        command's start. `code`: errno of the exception.
        """
        column = max(self._command.find(culprit), 0)
        self._error_log.add(self._location, self._command, error, column)
        return KernelError(code, self._error_log.text_of(error))

    @contextmanager
    def instead(self, error: CommandError, culprit: str = "") -> Iterator[None]:
        """If the `with` block raises KernelError, log `error`, and raise the exception of error() instead.

        The new exception has the errno of the old one. `culprit`: see error().
        """
        try:
            yield
        except KernelError as failure:
            raise self.error(error, culprit, failure.errno) from None
