"""trace_pipe: readers that consume events as text, and the base class of all consuming readers."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from itertools import islice

from emulated_kernel.trace.array.trace_array import TraceArray
from emulated_kernel.trace.output import graph_output
from emulated_kernel.trace.output.graph_output import GraphPrinter
from emulated_kernel.trace.output.line_formatter import (
    TOO_BIG,
    LineFormatter,
    TimedRecord,
    encode_text,
)
from emulated_kernel.trace.output.options import TraceOption
from emulated_kernel.trace.ring.buffer import Consumed, RingBuffer
from emulated_kernel.trace.ring.trace_entry import TRACE_ENTRY
from emulated_kernel.util.errors import KernelError, WouldBlock


class PipeReader:
    """Base class of readers that consume the events of one CPU or of all, and that can wait for events."""

    def __init__(self, array: TraceArray, cpu: int | None) -> None:
        self._array = array
        self._cpu = cpu
        self._cpus = range(array.system.cpus) if cpu is None else range(cpu, cpu + 1)
        self._closed = False
        self._changed = threading.Event()
        self._subscribers: list[Callable[[], None]] = []
        array.listeners.append(self._wake)
        array.open_pipes += 1

    @property
    def _buffers(self) -> Sequence[RingBuffer]:
        """The ring buffers by CPU. They are looked up at each use, because taking a snapshot swaps them."""
        return self._array.buffers

    def _is_empty(self) -> bool:
        return not any(len(self._buffers[cpu]) for cpu in self._cpus)

    def ready(self) -> bool:
        """Return True if poll(2) reports the pipe as readable.

        The pipe of all CPUs is readable if it has an event. The pipe of one CPU also needs buffer_percent of
        the CPU's buffer to be filled. With the trace option `block`, every pipe counts as readable.
        Mirrors: kernel/trace/ring_buffer.c:ring_buffer_poll_wait, full_hit (v6.1).
        """
        if self._array.options.flags & TraceOption.BLOCK:
            return True
        if self._cpu is None:
            return not self._is_empty()
        buffer = self._buffers[self._cpu]
        percent = self._array.buffer_percent
        if not percent:
            return not self._is_empty()
        return bool(len(buffer)) and (buffer.dirty_pages + 1) * 100 >= percent * buffer.nr_pages

    def wait(self, timeout: float) -> None:
        """Wait until read() may return new data, for at most `timeout` seconds.

        Hazard: the caller must not hold the control lock, which the writers of events need.
        """
        self._changed.wait(timeout)

    def subscribe(self, notify: Callable[[], None]) -> None:
        """Call `notify` once: now if the pipe is ready or closed, else when it gets ready or is closed.

        If the call of `notify` is still to come, switching tracing off causes it, too.
        """
        if self.ready() or self._closed:
            notify()
        else:
            self._subscribers.append(notify)

    def _wake(self) -> None:
        self._changed.set()
        if self._subscribers and (self.ready() or not self._array.tracing_on):
            self._notify_subscribers()

    def _notify_subscribers(self) -> None:
        subscribers = self._subscribers
        self._subscribers = []
        for notify in subscribers:
            notify()

    def close(self) -> None:
        """Close the pipe and wake all tasks that wait for it."""
        if self._closed:
            return
        self._closed = True
        self._array.open_pipes -= 1
        self._array.listeners.remove(self._wake)
        self._changed.set()
        self._notify_subscribers()


class TracePipe(PipeReader):
    """An open trace_pipe of all CPUs, or of one."""

    def __init__(self, array: TraceArray, cpu: int | None = None) -> None:
        """Open the pipe of the CPU `cpu`, or of all CPUs if `cpu` is None.

        Raises: KernelError EBUSY (a pipe of the same CPU is open already; a pipe of all CPUs excludes all
        others).
        Mirrors: kernel/trace/trace.c:open_pipe_on_cpu, close_pipe_on_cpu (v6.1).
        """
        if None in array.piped or (array.piped if cpu is None else cpu in array.piped):
            raise KernelError(errno.EBUSY, "trace_pipe: another reader has it open; close that one first")
        array.piped.add(cpu)
        super().__init__(array, cpu)
        self._tail = b""
        self._has_read = False
        self._graph: GraphPrinter | None = None

    def close(self) -> None:
        """Close the pipe, so that another pipe of its CPUs can be opened, and wake all waiting tasks."""
        if not self._closed:
            self._array.piped.discard(self._cpu)
        super().close()

    def read(self, size: int, *, nonblock: bool = False) -> bytes:
        """Consume the oldest events and return their text, or b"" at the end of the file.

        A read returns at most LineFormatter.limit bytes, in whole lines if `size` is large enough. The next
        read returns the text that exceeds `size`. The end is reached after close(). Unless `nonblock` is set,
        it is also reached if the buffers are empty, tracing is off, and an earlier read has returned events.
        Raises: WouldBlock (there is no event, and the end is not reached).
        Mirrors: kernel/trace/trace.c:tracing_read_pipe, tracing_wait_pipe (v6.1).
        """
        if self._closed:
            return b""
        if not self._tail and size > 0:
            if self._is_empty():
                self._changed.clear()
                if self._has_read and not nonblock and not self._array.tracing_on:
                    return b""
                raise WouldBlock
            self._has_read = True
            self._tail = self._take_lines(size)
        data = self._tail[:size]
        self._tail = self._tail[size:]
        return data

    def _take_lines(self, wanted: int) -> bytes:
        formatter = self._array.formatter()
        limit = formatter.limit
        wanted = min(wanted, limit)
        text = b""
        index = 0
        while len(text) < wanted and (found := self._next_entry()):
            entry, lost = found
            index += 1
            line = encode_text(self._line(formatter, entry, index))
            if lost:
                line = b"CPU:%d [LOST %d EVENTS]\n" % (entry.cpu, lost) + line
            if len(text) + len(line) > limit:
                if text:
                    break
                line = line[: limit - len(TOO_BIG)] + TOO_BIG.encode()
            text += line
            self._buffers[entry.cpu].consume()
        return text

    def _line(self, formatter: LineFormatter, entry: TimedRecord, index: int) -> str:
        if self._array.current_tracer != graph_output.NAME:
            self._graph = None
            return formatter.line(entry, entry.time_stamp, index)
        # The printer is kept between reads: a call may begin in one read and return in another.
        if self._graph is None:
            self._graph = self._array.graph_printer()
        graph = self._graph
        assert graph is not None
        if not graph.prints(entry.record):
            return formatter.line(entry, entry.time_stamp, index)
        following = next(islice(self._buffers[entry.cpu], 1, None), None)
        return graph.line(entry, None if following is None else following[1], formatter)

    def _peek(self, cpu: int) -> Consumed | None:
        """Return the oldest event of a CPU, or None if the CPU's buffer is empty.

        A damaged buffer may have records that are too short for the common fields; they are consumed and
        skipped.
        """
        buffer = self._buffers[cpu]
        event = buffer.peek()
        while event is not None and len(event.record) < TRACE_ENTRY.size:
            buffer.consume()
            event = buffer.peek()
        return event

    def _next_entry(self) -> tuple[TimedRecord, int] | None:
        best: tuple[TimedRecord, int] | None = None
        for cpu in self._cpus:
            event = self._peek(cpu)
            if event is not None and (best is None or event.time_stamp < best[0].time_stamp):
                best = TimedRecord(event.time_stamp, cpu, event.record), event.lost_events
        return best
