"""EventFilters: the filter files of events and groups, including the parse errors that they show."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence

from emulated_kernel.trace.events.event import Recorder, TraceEvent
from emulated_kernel.trace.filter.filter_errors import FilterError, FilterParseError
from emulated_kernel.trace.filter.parse import parse_event_filter
from emulated_kernel.trace.filter.predicates import EventFilter
from emulated_kernel.trace.filter.words import NO_WORDS, FilterWords
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
"""Text of a group's filter file. As in Linux, the promised error message never appears."""

_LOCATION = "event filter parse error"
_NO_FILTER = "none\n"
_CLEAR = "0"


class EventFilters:
    """Sets, clears and shows the filters of one trace array's events.

    `recorder` is the trace array. The events hold their filters, so a filter is removed with its event.
    Callers hold the control lock, in the place of Linux's event_mutex.
    Mirrors: kernel/trace/trace_events_filter.c (v6.1).
    """

    def __init__(self, recorder: Recorder, error_log: ErrorLog, words: FilterWords = NO_WORDS) -> None:
        self._recorder = recorder
        self._words = words
        self._error_log = error_log

    def text(self, event: TraceEvent) -> str:
        """Return the text of an event's filter file.

        Linux: the text is empty if it does not fit into a page.
        Mirrors: kernel/trace/trace_events_filter.c:print_event_filter (v6.1).
        """
        event_filter = event.filters.get(self._recorder)
        return to_text(_within_page([f"{event_filter.text}\n"])) if event_filter else _NO_FILTER

    def set_text(self, event: TraceEvent) -> str | None:
        """Return the text of the filter that is set for `event`, or None if no filter is set."""
        event_filter = event.filters.get(self._recorder)
        return to_text(event_filter.text) if event_filter else None

    def write(self, event: TraceEvent, data: bytes) -> None:
        """Set the event's filter to the written text `data`. "0" clears the filter.

        If the text cannot be parsed, the event has no filter afterwards, and the file shows the error.
        Raises: KernelError EINVAL (`data` takes a page or more), ENOMEM, errors of parse_event_filter().
        Mirrors: kernel/trace/trace_events_filter.c:apply_event_filter (v6.1).
        """
        text = _written(data)
        if _is_clear(text):
            self._clear([event])
            return
        try:
            self._set(event, text)
        except FilterParseError as failure:
            self._show_error(event, text, failure)
            raise

    def write_group(self, events: Sequence[TraceEvent], data: bytes) -> None:
        """Set the filter of all events of a group to the written text `data`. "0" clears the filters.

        `events` are in order of registration. Linux: the write succeeds even if the filter is wrong for some
        events; error_log shows the error of the newest event first.
        Raises: KernelError EINVAL (`data` takes a page or more), ENODEV (there are no events), ENOMEM.
        Mirrors: kernel/trace/trace_events_filter.c:apply_subsystem_event_filter (v6.1).
        """
        text = _written(data)
        if not events:
            raise KernelError(errno.ENODEV, "the group has no events")
        if _is_clear(text):
            self._clear(events)
            return
        for event in reversed(events):
            try:
                self._set(event, text)
            except FilterParseError:
                self._show_error(event, text, FilterParseError(FilterError.BAD_SUBSYS_FILTER))

    def _clear(self, events: Iterable[TraceEvent]) -> None:
        for event in events:
            event.set_filter(self._recorder, None)

    def _set(self, event: TraceEvent, text: str) -> None:
        event.set_filter(self._recorder, parse_event_filter(text, event.fields, self._words))

    def _show_error(self, event: TraceEvent, text: str, failure: FilterParseError) -> None:
        """Log the parse error `failure` of the filter `text`, and show the error in the event's filter file.

        Mirrors: kernel/trace/trace_events_filter.c:append_filter_err (v6.1).
        """
        log_filter_error(self._error_log, text, failure)
        shown = self._error_text(text, failure)
        event.set_filter(self._recorder, EventFilter(shown, None, self._words.memory.charge_text(shown)))

    def _error_text(self, text: str, failure: FilterParseError) -> str:
        """Return the content of a filter file after a parse error: the filter, a caret and the error.

        `text`: the filter. `failure`: the error and its column. If `failure.error` is None, only the errno is
        known: no caret is shown, and the text of the error is "0". The caret is at most one column after the
        filter's end.
        """
        if failure.error is None:
            return _within_page([text, "\nError: (0)\n"])
        column = min(failure.column, len(text))
        caret = " " * column + "^"
        told = self._error_log.text_of(failure.error)
        return _within_page([text, f"\n{caret}", f"\nparse_error: {told}\n"])


def log_filter_error(error_log: ErrorLog, text: str, failure: FilterParseError) -> None:
    """Write `failure`, the parse error of the filter `text`, to error_log."""
    error = failure.error or FilterError.ERRNO
    error_log.add(_LOCATION, text, error, failure.column)


def _written(data: bytes) -> str:
    """Return the written text `data` up to a NUL, without trailing blanks.

    Raises: KernelError EINVAL (`data` takes a page or more).
    """
    if len(data) >= PAGE_SIZE:
        raise KernelError(errno.EINVAL, "event filter: the text is too long; write less than a page")
    return decode_command(data.partition(b"\0")[0]).rstrip(SPACES)


def _is_clear(text: str) -> bool:
    return text.lstrip(SPACES) == _CLEAR


def _within_page(parts: Iterable[str]) -> str:
    """Return the joined parts, up to the first part with which the text would exceed a page.

    The text and its final NUL, which is not returned, take at most PAGE_SIZE bytes. The part that does not
    fit and all later parts are dropped.
    Mirrors: kernel/trace/trace_seq.c (v6.1).
    """
    text = ""
    for part in parts:
        if len(text) + len(part) >= PAGE_SIZE:
            break
        text += part
    return text
