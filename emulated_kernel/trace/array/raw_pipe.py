"""trace_pipe_raw and snapshot_raw: a reader that takes a CPU's events out of its buffer as binary pages."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from emulated_kernel.trace.array.trace_array import TraceArray
from emulated_kernel.trace.array.trace_pipe import PipeReader
from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.util.errors import KernelError, WouldBlock


class RawPipe(PipeReader):
    """An open trace_pipe_raw of a CPU; several may be open, each event goes to one of them.

    The pages are as page.py says.
    """

    def __init__(self, array: TraceArray, cpu: int, *, snapshot: bool = False) -> None:
        """`snapshot`: of the events set aside."""
        super().__init__(array, cpu)
        self._cpu_number = cpu
        self._snapshot = snapshot
        self._page = b""

    @property
    def _buffers(self) -> Sequence[RingBuffer]:
        return self._array.snapshot.buffers if self._snapshot else self._array.buffers

    def read(self, size: int, *, nonblock: bool = False) -> bytes:
        """What is left of the page that was begun, or a new one; b"" only for size 0 or once closed.

        Raises: WouldBlock (while there is nothing).
        Deviates: Linux fills a page only with the events that fit into `size`, and pads it.
        Mirrors: kernel/trace/trace.c:tracing_buffers_read (v6.1)
        """
        del nonblock
        if self._closed or not size:
            return b""
        if not self._page:
            self._changed.clear()
            page = self._buffers[self._cpu_number].read_page()
            if page is None:
                raise WouldBlock
            self._page = page
        data = self._page[:size]
        self._page = self._page[size:]
        return data

    def splice_page(self) -> bytes:
        """A sub-buffer that is full, as one page of splice(2).

        Raises: KernelError EAGAIN (while there is none), EINVAL (while a read(2) has left a part of a page).
        Deviates: Linux waits for one unless it is told not to.
        Mirrors: kernel/trace/trace.c:tracing_buffers_splice_read (v6.1)
        """
        if self._page:
            raise KernelError(errno.EINVAL, "the position is inside of a page")
        page = None if self._closed else self._buffers[self._cpu_number].read_page(full=True)
        if page is None:
            raise KernelError(errno.EAGAIN)
        return page
