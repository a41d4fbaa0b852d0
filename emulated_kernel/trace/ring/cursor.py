"""RingCursor: reads a ring buffer's events without consuming them, while the buffer is written and consumed.

Mirrors: kernel/trace/ring_buffer.c:struct ring_buffer_iter (v6.1).
Deviates: Linux's iterator yields later events at once. Here the reads of a program may add events faster than
the program reads them, so the cursor has an end, which extend() moves.
"""

from __future__ import annotations

from collections.abc import Iterator

from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.util.fast_named_tuple import NamedTuple


class CursorEvent(NamedTuple):
    """An event that a cursor has read."""

    time_stamp: int
    """Time of the event, in units of the trace clock."""
    record: bytes
    follows_lost: bool
    """Whether the cursor missed events just before this event, because they were overwritten or consumed."""


class RingCursor:
    """A position among the unread events that a buffer held when the cursor was created.

    The cursor copies the events of one sub-buffer at a time. It yields later events only after extend().
    """

    def __init__(self, buffer: RingBuffer) -> None:
        buffer.check()
        self._buffer = buffer
        self._generation = buffer.generation
        self._next = buffer.oldest
        """Sequence number of the next event to yield. The buffer's first event after a reset has number 0."""
        self._end = buffer.written
        self._place: tuple[int, int] | None = None
        """Index of the last copied sub-buffer, and the sequence number of its first unread event.

        The index is that of RingBuffer.unread_count(). The value is None if the index is unknown.
        """
        self._state = buffer.reader_state

    @property
    def is_stale(self) -> bool:
        """Whether the buffer was emptied or freed after the cursor was created."""
        return self._buffer.generation != self._generation

    def extend(self) -> None:
        """Move the cursor's end, so that it also yields the events that were written until now.

        Do nothing if the cursor is stale.
        """
        if not self.is_stale:
            self._end = self._buffer.written

    def __iter__(self) -> Iterator[CursorEvent]:
        """Yield the events that were not yielded yet, up to the cursor's end.

        Between two events, the buffer may change. Stop if `is_stale` becomes True.
        """
        while self._next < self._end:
            oldest = self._buffer.oldest
            is_late = self._next < oldest
            if is_late:
                self._next = oldest
                if oldest >= self._end:
                    return
            for stamp, record in self._copy():
                yield CursorEvent(stamp, record, is_late)
                is_late = False

    def _copy(self) -> list[tuple[int, bytes]]:
        """Return (time stamp, record) of the events of one sub-buffer from the next event on.

        Advance the position past these events. The list is empty if the cursor is stale or at its end.
        """
        buffer = self._buffer
        buffer.check()
        if self.is_stale:
            self._next = self._end
            return []
        state = buffer.reader_state
        if state != self._state:
            self._state = state
            self._place = None
        index, first = self._place or (0, buffer.oldest)
        while index <= buffer.nr_pages and self._next >= first + (count := buffer.unread_count(index)):
            first += count
            index += 1
        found = buffer.unread_events(index)[self._next - first : self._end - first]
        # The counters of a buffer that was recovered from a file may be wrong.
        self._next = self._next + len(found) if found else self._end
        # The tail may get further events, so the next call looks at the same sub-buffer again.
        self._place = (index, first)
        return found
