"""HistPoll: readiness of an open hist file for poll(2), with which a client waits for hits."""

from __future__ import annotations

import select
from collections.abc import Callable

from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.hist.services import hists_of
from emulated_kernel.trace.trigger.triggers import EventTriggers


class HistPoll:
    """The numbers of hits that one open hist file has shown and reported.

    Mirrors: kernel/trace/trace_events_hist.c:struct hist_file_data, event_hist_poll (v7.2).
    """

    def __init__(self, triggers: EventTriggers, event: TraceEvent) -> None:
        self._waiters = triggers.registry.hist_waiters
        self._file = triggers.file(event)
        self._shown = 0
        self._reported = self._hits()
        self._notify: Callable[[], None] | None = None

    def _hits(self) -> int:
        return sum(data.map.hits for data in hists_of(self._file))

    def shown(self) -> None:
        """Remember that a read has shown all hits up to now."""
        self._shown = self._reported = self._hits()

    def poll(self, notify: Callable[[], None] | None) -> int:
        """Return the poll events that the file reports now.

        POLLIN: the last read did not show all hits. POLLPRI: there were hits since the last read and since
        the last call that returned POLLPRI.
        `notify`: function to call once, at the next hit, in place of the one that an earlier call set. If it
        is None, the earlier function stays set.
        """
        hits = self._hits()
        mask = select.POLLIN | select.POLLRDNORM if self._shown != hits else 0
        if self._reported != hits:
            self._reported = hits
            mask |= select.POLLPRI
        if notify is not None:
            self.forget()
            self._notify = notify
            self._waiters.append(self._changed)
        return mask

    def _changed(self) -> None:
        notify = self._notify
        if notify is not None and self._hits() != self._reported:
            self.forget()
            notify()

    def forget(self) -> None:
        """Drop the function `notify` of the last poll(), so that it is not called at the next hit."""
        if self._notify is not None:
            self._notify = None
            self._waiters.remove(self._changed)
