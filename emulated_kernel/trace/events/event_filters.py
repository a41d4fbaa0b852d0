"""The filter files of events and groups: set, cleared and shown, errors included."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence

from emulated_kernel.trace.events.event import Recorder, TraceEvent
from emulated_kernel.trace.filter.filter_errors import FilterError, FilterParseError
from emulated_kernel.trace.filter.parse import parse_event_filter
from emulated_kernel.trace.filter.predicates import EventFilter
from emulated_kernel.trace.text.chars import SPACES, decode_command, to_text
from emulated_kernel.trace.text.error_log import ErrorLog
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.errors import KernelError

GROUP_FILTER_TEXT = """\
### global filter ###
# Use this to set filters for multiple events.
# Only events with the given fields will be affected.
# If no events are modified, an error message will be displayed here
"""
"""What a group's filter file shows. Linux: the message that its last line speaks of never comes."""

_LOCATION = "event filter parse error"
_NO_FILTER = "none\n"
_CLEAR = "0"


class EventFilters:
    """The filters of a trace array's events; they are kept with the events, and go with them.

    `recorder` stands for the trace array. Callers serialize: Linux holds event_mutex.
    Mirrors: kernel/trace/trace_events_filter.c (v6.1).
    """

    def __init__(self, recorder: Recorder, error_log: ErrorLog) -> None:
        self._recorder = recorder
        self._error_log = error_log

    def text(self, event: TraceEvent) -> str:
        """What the event's filter file shows. Linux: nothing, if that doesn't fit into a page.

        Mirrors: print_event_filter (v6.1).
        """
        event_filter = event.filters.get(self._recorder)
        return to_text(_within_page([f"{event_filter.text}\n"])) if event_filter else _NO_FILTER

    def write(self, event: TraceEvent, data: bytes) -> None:
        """Set the event's filter; "0" clears it, as does one that is wrong, whose error is shown then.

        Raises: KernelError EINVAL (a page or more), FilterParseError (as parse_filter does).
        Mirrors: apply_event_filter (v6.1).
        """
        text = _written(data)
        if _is_clear(text):
            self._clear([event])
            return
        failure = self._set(event, text)
        if failure is not None:
            self._show_error(event, text, failure)
            raise failure

    def write_group(self, events: Sequence[TraceEvent], data: bytes) -> None:
        """Set the filter of all these events, in order of registration; "0" clears them.

        Linux: no event's error is the write's; the newest event is first in error_log.
        Raises: KernelError EINVAL (a page or more), ENODEV (there are no events).
        Mirrors: apply_subsystem_event_filter (v6.1).
        """
        text = _written(data)
        if not events:
            raise KernelError(errno.ENODEV, "the group has no events")
        if _is_clear(text):
            self._clear(events)
            return
        for event in reversed(events):
            if self._set(event, text) is not None:
                self._show_error(event, text, FilterParseError(FilterError.BAD_SUBSYS_FILTER))

    def _clear(self, events: Iterable[TraceEvent]) -> None:
        for event in events:
            event.set_filter(self._recorder, None)

    def _set(self, event: TraceEvent, text: str) -> FilterParseError | None:
        try:
            event.set_filter(self._recorder, parse_event_filter(text, event.fields))
        except FilterParseError as failure:
            return failure
        return None

    def _show_error(self, event: TraceEvent, text: str, failure: FilterParseError) -> None:
        """Mirrors: append_filter_err (v6.1)."""
        log_filter_error(self._error_log, text, failure)
        event.set_filter(self._recorder, EventFilter(_error_text(text, failure), None))


def log_filter_error(error_log: ErrorLog, text: str, failure: FilterParseError) -> None:
    """Tell of a filter that can't be parsed."""
    error = failure.error or FilterError.ERRNO
    error_log.add(_LOCATION, text, error.value, failure.column)


def _written(data: bytes) -> str:
    """The text of a write, without what follows a NUL, and without blanks at its end."""
    if len(data) >= PAGE_SIZE:
        raise KernelError(errno.EINVAL, "a filter is shorter than a page")
    return decode_command(data.partition(b"\0")[0]).rstrip(SPACES)


def _is_clear(text: str) -> bool:
    return text.lstrip(SPACES) == _CLEAR


def _error_text(text: str, failure: FilterParseError) -> str:
    """The filter, and below it the error; its caret stays within the text."""
    if failure.error is None:
        return _within_page([text, "\nError: (0)\n"])
    column = min(failure.column, len(text))
    caret = " " * column + "^"
    return _within_page([text, f"\n{caret}", f"\nparse_error: {failure.error.value}\n"])


def _within_page(parts: Iterable[str]) -> str:
    """The first parts that fit into a page with a NUL. Mirrors: kernel/trace/trace_seq.c (v6.1)."""
    text = ""
    for part in parts:
        if len(text) + len(part) >= PAGE_SIZE:
            break
        text += part
    return text
