"""Errors of event filters: their texts in error_log, and the exception for them."""

from __future__ import annotations

import errno

from emulated_kernel.trace.text.error_log import CommandError
from emulated_kernel.util.errors import KernelError


class FilterError(CommandError):
    """Errors of filters; the value is the text in error_log.

    Mirrors: kernel/trace/trace_events_filter.c:ERRORS (v6.1, v6.12).
    """

    INVALID_OP = "Invalid operator"
    TOO_MANY_OPEN = "Too many '('"
    TOO_MANY_CLOSE = "Too few '('"
    MISSING_QUOTE = "Missing matching quote"
    MISSING_BRACE_OPEN = "Missing '{'"
    MISSING_BRACE_CLOSE = "Missing '}'"
    OPERAND_TOO_LONG = "Operand too long"
    EXPECT_STRING = "Expecting string field"
    EXPECT_DIGIT = "Expecting numeric field"
    ILLEGAL_FIELD_OP = "Illegal operation for field type"
    FIELD_NOT_FOUND = "Field not found"
    ILLEGAL_INTVAL = "Illegal integer value"
    BAD_SUBSYS_FILTER = "Couldn't find or set field in one of a subsystem's events"
    TOO_MANY_PREDS = "Too many terms in predicate expression"
    INVALID_FILTER = "Meaningless filter expression"
    INVALID_VALUE = "Invalid value (did you forget quotes)?"
    ERRNO = "Error"
    """Text in error_log for an error of which only the errno is known."""
    NO_FILTER = "No filter found"
    NO_FUNCTION = "Function not found"
    INVALID_CPULIST = "Invalid cpulist"


class FilterParseError(KernelError):
    """A filter that cannot be parsed. `column` is the column at which the caret in error_log points.

    If `error` is None, only the errno is known.
    """

    def __init__(self, error: FilterError | None, column: int = 0, code: int = errno.EINVAL) -> None:
        super().__init__(code, error.texts[0] if error else "malformed filter")
        self.error = error
        self.column = column
