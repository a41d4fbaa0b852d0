"""trace_pipe_raw and snapshot_raw: a reader that takes a CPU's events out of its buffer as binary pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from emulated_kernel.errors import WouldBlock
from emulated_kernel.trace.trace_pipe import PipeReader

if TYPE_CHECKING:
    from emulated_kernel.trace.ring_buffer import RingBuffer
    from emulated_kernel.trace.trace_array import TraceArray


class RawPipe(PipeReader):
    """An open trace_pipe_raw of a CPU; several may be open, each event goes to one of them.

    The pages are as ring_page.py says.
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

    def read(self, size: int) -> bytes:
        """What is left of the page that was begun, or a new one; b"" only for size 0 or once closed.

        Raises: WouldBlock while there is nothing.
        Deviates: Linux fills a page only with the events that fit into `size`, and pads it.
        Mirrors: kernel/trace/trace.c:tracing_buffers_read (v6.1)
        """
        if self._closed or not size:
            return b""
        if not self._page:
            self._changed.clear()
            page = self._buffers[self._cpu_number].read_page()
            if page is None:
                raise WouldBlock
            self._page = page
        data, self._page = self._page[:size], self._page[size:]
        return data
