"""trace_pipe_raw and snapshot_raw: readers that consume a CPU's events as binary pages."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from emulated_kernel.trace.array.trace_array import TraceArray
from emulated_kernel.trace.array.trace_pipe import PipeReader
from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.errors import KernelError, WouldBlock


class RawPipe(PipeReader):
    """An open trace_pipe_raw or snapshot_raw of one CPU.

    If several files of one CPU are open, each event goes to only one of them. ring/buffer_page.py describes
    the format of the pages.
    """

    def __init__(self, array: TraceArray, cpu: int, *, snapshot: bool = False) -> None:
        """Open the buffer of a CPU: the snapshot's if `snapshot`, else the trace array's."""
        super().__init__(array, cpu)
        self._cpu_number = cpu
        self._snapshot = snapshot
        self._page = b""

    @property
    def _buffers(self) -> Sequence[RingBuffer]:
        return self._array.snapshot.buffers if self._snapshot else self._array.buffers

    def read(self, size: int, *, nonblock: bool = False) -> bytes:
        """Return at most `size` bytes: the rest of the page that the last read began, or a new page.

        The result is b"" only if `size` is 0 or the pipe is closed.
        `nonblock` is ignored.
        Raises: WouldBlock (there is no event).
        Deviates: Linux fills a page only with the events that fit into `size`, and pads it.
        Mirrors: kernel/trace/trace.c:tracing_buffers_read (v6.1).
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
        """Return the next 4096 bytes for splice(2).

        A sub-buffer larger than 4096 bytes is returned by several calls, one page at a time. After its last
        page, the next call begins with the next full sub-buffer.
        Raises: KernelError EAGAIN (no sub-buffer is full), EINVAL (a read(2) has left a part of a page).
        Deviates: Linux waits for a full sub-buffer unless the call is non-blocking. Linux refuses a call
        for fewer bytes than a sub-buffer has; here, the next call returns the rest.
        Mirrors: kernel/trace/trace.c:tracing_buffers_splice_read (v6.1).
        """
        if len(self._page) % PAGE_SIZE:
            raise KernelError(errno.EINVAL, "trace_pipe_raw: a page is half read; read(2) its rest first")
        page = self._page
        if not page and not self._closed:
            page = self._buffers[self._cpu_number].read_page(full=True) or b""
        if not page:
            raise KernelError(errno.EAGAIN)
        self._page = page[PAGE_SIZE:]
        return page[:PAGE_SIZE]
