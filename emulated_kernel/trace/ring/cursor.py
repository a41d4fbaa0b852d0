"""RingCursor: reading of a ring buffer's events without consuming them, while others write and consume.

Mirrors: kernel/trace/ring_buffer.c:struct ring_buffer_iter (v6.1), which ends only where the writer is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from emulated_kernel.trace.ring.buffer import RingBuffer


class CursorEvent(NamedTuple):
    """An event that a cursor has read; its time is in clock units."""

    time_stamp: int
    record: bytes
    follows_lost: bool
    """Whether events just before this one were overwritten or consumed before the cursor reached them."""


class RingCursor:
    """A position among the unread events that a buffer holds when the cursor is made.

    It copies the events of one sub-buffer at a time. Events that are written later do not belong to it.
    """

    def __init__(self, buffer: RingBuffer) -> None:
        buffer.check()
        self._buffer = buffer
        self._generation = buffer.generation
        self._next = buffer.oldest
        """Number of the next event, counted from the buffer's last reset."""
        self._end = buffer.written
        self._place: tuple[int, int] | None = None
        """Index of a sub-buffer among the unread ones, and the number of its first event."""
        self._state = buffer.reader_state

    @property
    def is_stale(self) -> bool:
        """Whether the buffer was emptied or freed since the cursor was made."""
        return self._buffer.generation != self._generation

    def __iter__(self) -> Iterator[CursorEvent]:
        """Yield the events. Between two of them the buffer may change, but it must not get stale."""
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
        """Return the events of one sub-buffer from the next event on, and pass them."""
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
        # The tail may get further events, so it is not passed.
        self._place = (index, first)
        return found
