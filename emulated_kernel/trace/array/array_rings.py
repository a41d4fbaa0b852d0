"""The ring buffers of a trace array: their memory, sizes, switches, and the listeners for new records."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

from emulated_kernel.trace.array.services import TracingServices
from emulated_kernel.trace.interface import InterfaceRule
from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.trace.ring.ring_layout import (
    RingControls,
    RingMemory,
    RingShape,
    memory_size,
    pages_for,
)
from emulated_kernel.util.errors import KernelError

DEFAULT_BUFFER_SIZE = 1441792
"""Size of each CPU's buffer in bytes after something was traced, unless buffer_size_kb sets another.

Mirrors: kernel/trace/trace.c:TRACE_BUF_SIZE_DEFAULT.
"""
UNEXPANDED_SIZE = 1
"""Size of each CPU's buffer in bytes before anything is traced; it is rounded up to MIN_PAGES sub-buffers."""


def check_resizable(buffers: Iterable[RingBuffer], number: int) -> None:
    """Check that no open trace file reads any of `buffers`.

    Raises: KernelError with the errno `number` (a trace file reads a buffer).
    Mirrors: kernel/trace/ring_buffer.c:ring_buffer_resize (v6.1).
    """
    if any(buffer.held for buffer in buffers):
        raise KernelError(number, "the buffer is being read; close the open trace files first")


class ArrayRings(ABC):
    """The ring buffers of a trace array, one per CPU, with their switches.

    Callers serialise all calls, and `listeners` are called under the callers' lock.
    Mirrors: kernel/trace/trace.h:struct array_buffer (v6.1).
    """

    def __init__(self, system: TracingServices, *, expanded: bool) -> None:
        """Allocate the buffers: of full size if `expanded`, else of the smallest size.

        Raises: KernelError ENOMEM.
        """
        self.system = system
        self.listeners: list[Callable[[], None]] = []
        self.cpumask = (1 << system.cpus) - 1
        """CPUs whose events are recorded; bit N is set for CPU N."""
        self._expands_alone = expanded and InterfaceRule.ARRAYS_EXPANDED_ALONE in system.interface
        """Whether `is_expanded` is True from the array's creation on, regardless of the top array."""
        self._overwrite = True
        self._tracing_on = True
        self._switches = 0
        """Number of times that recording was switched on or off."""
        self._has_recorded = False
        """Whether a record was ever written to buffers that the present buffers have replaced."""
        self._stopped = 0
        self._notified = 0
        """Value of `written` when notify_of_guest() last called the listeners."""
        self._sets: list[tuple[RingControls, list[RingBuffer]]] = []
        self.buffers = self.new_buffers(pages_for(DEFAULT_BUFFER_SIZE if expanded else UNEXPANDED_SIZE))
        self._sizes = [0] * system.cpus
        """Capacity in bytes that each CPU's buffer had when it was last resized.

        Mirrors: kernel/trace/trace.h:struct trace_array_cpu.entries (v6.12).
        """
        self.note_sizes()

    @property
    def order(self) -> int:
        """The order of the sub-buffers, which have 4096 << order bytes."""
        return self.buffers[0].order

    @property
    def cpus(self) -> int:
        """Number of CPUs that have a buffer."""
        return self.system.cpus

    # -- memory

    def new_buffers(self, pages: int) -> list[RingBuffer]:
        """Return one empty buffer per CPU, each with `pages` sub-buffers of 4096 bytes.

        Raises: KernelError ENOMEM (nothing stays allocated).
        """
        system = self.system
        controls = system.memory.allocate_controls(system.cpus)
        try:
            memories = self.allocate([RingShape(pages)] * system.cpus)
        except KernelError:
            controls.release()
            raise
        buffers = [RingBuffer(controls.place(cpu, memory), pages) for cpu, memory in enumerate(memories)]
        self._sets.append((controls, buffers))
        return buffers

    def allocate(self, shapes: Iterable[RingShape]) -> list[RingMemory]:
        """Return memory for ring buffers: one RingMemory for each of `shapes`, in their order.

        Raises: KernelError ENOMEM (nothing stays allocated).
        """
        memories: list[RingMemory] = []
        with ExitStack() as undo:
            for shape in shapes:
                memories.append(self.system.memory.allocate(memory_size(*shape)))
                undo.callback(memories[-1].release)
            undo.pop_all()
        return memories

    def exchange(self, buffers: Sequence[RingBuffer], shapes: Iterable[RingShape]) -> list[RingMemory]:
        """Free the memory of `buffers`, and return memory for new ones: one RingMemory for each of `shapes`.

        The records in `buffers` are lost.

        Raises: KernelError ENOMEM (nothing is freed).
        """
        self.note_recorded()
        old = [buffer.place for buffer in buffers]
        with self.system.memory.exchanged(old, [memory_size(*shape) for shape in shapes]) as memories:
            for buffer in buffers:
                buffer.retire()
            return memories

    def reshape(self, buffers: Sequence[RingBuffer], shapes: Sequence[RingShape]) -> list[RingBuffer]:
        """Replace each buffer by an empty one of another shape, and return the new buffers.

        `shapes`: the new shape of each of `buffers`. A new buffer takes over the control block of the old
        buffer, whose pages are freed.

        Raises: KernelError ENOMEM (nothing is freed).
        """
        memories = self.exchange(buffers, shapes)
        return [
            RingBuffer(buffer.place.moved_to(memory), shape.pages, order=shape.order)
            for buffer, memory, shape in zip(buffers, memories, shapes, strict=True)
        ]

    def release(self) -> None:
        """Free the memory of all buffers. After this call, no record may be written to the buffers."""
        for controls, buffers in self._sets:
            for buffer in buffers:
                buffer.retire()
                buffer.place.release()
            controls.release()

    # -- listeners

    def notify(self) -> None:
        """Call the listeners, which then look for new data, or for a reason to stop waiting for data.

        The host also calls this method after guest code has written to the memory of a buffer.
        """
        for listener in tuple(self.listeners):
            listener()

    @property
    def written(self) -> int:
        """Number of records that the host and guest code have written since the buffers were emptied."""
        return sum(buffer.written for buffer in self.buffers)

    def notify_of_guest(self) -> None:
        """Call the listeners if records were written to the buffers since this method last called them.

        Callers do this after the guest ran, because guest code does not call the listeners.
        """
        if self.listeners and self.written != self._notified:
            self._notified = self.written
            self.notify()

    @abstractmethod
    def notify_rewired(self) -> None:
        """Recompile the guest code that writes to the buffers, because other buffers have replaced them.

        Until this method is called, guest code writes to the old buffers.
        """

    # -- switches

    @property
    def tracing_on(self) -> bool:
        """Whether recording is switched on: the value of the file tracing_on.

        It does not depend on stop(), which also stops recording.
        """
        return self._tracing_on

    def off_since(self) -> int | None:
        """Return None if recording is on, else a number that identifies the present pause; see Recorder."""
        return None if self._tracing_on else self._switches

    @property
    def has_recorded(self) -> bool:
        """Whether a record was ever written to the buffers, or to the buffers that they have replaced."""
        return self._has_recorded or any(buffer.has_recorded for buffer in self.buffers)

    def note_recorded(self) -> None:
        """Store the value of `has_recorded`; call this before other buffers replace the present ones."""
        self._has_recorded = self.has_recorded

    def set_tracing_on(self, on: bool) -> None:
        """Switch recording on if `on`, else off. Switching it off wakes readers that wait for data.

        Mirrors: kernel/trace/trace.c:tracer_tracing_on, tracer_tracing_off (v6.1).
        """
        if on == self._tracing_on:
            return
        self._tracing_on = on
        self._switches += 1
        self.apply_switches()
        if not on:
            self.notify()

    @property
    def is_stopped(self) -> bool:
        """Whether a reader has stopped recording, so that the trace that is being read does not change."""
        return self._stopped > 0

    def stop(self) -> None:
        """Stop recording; it continues when start() has been called as often as this method.

        Mirrors: kernel/trace/trace.c:tracing_stop_tr (v6.1).
        """
        self._stopped += 1
        self.apply_switches()

    def start(self) -> None:
        """Undo one call of stop(); do nothing if all calls are undone.

        Mirrors: kernel/trace/trace.c:tracing_start_tr (v6.1).
        """
        self._stopped = max(0, self._stopped - 1)
        self.apply_switches()

    def set_cpumask(self, mask: int) -> None:
        """Record only the events of the CPUs whose bits are set in `mask`.

        Mirrors: kernel/trace/trace.c:tracing_set_cpumask (v6.1).
        """
        self.cpumask = mask
        self.apply_switches()

    def apply_switches(self) -> None:
        """Set `disabled` and `overwrite` of each buffer as this trace array's switches require."""
        is_on = self._tracing_on and not self._stopped
        for cpu, buffer in enumerate(self.buffers):
            buffer.disabled = not (is_on and self.cpumask >> cpu & 1)
            buffer.overwrite = self._overwrite

    # -- sizes

    @property
    def is_expanded(self) -> bool:
        """Whether the buffers were resized, to their full size or to one that was written to buffer_size_kb.

        Before Linux 6.8, all trace arrays have the same value: TracingServices.is_expanded.

        Mirrors: kernel/trace/trace.h:struct trace_array.ring_buffer_expanded (v6.12).
        """
        return self._expands_alone or self.system.is_expanded

    def expand(self) -> None:
        """Resize the buffers to their full size, unless they are expanded already.

        Callers do this before an event is enabled.
        Mirrors: kernel/trace/trace.c:tracing_update_buffers (v6.1).
        """
        if not self.is_expanded:
            self._resize(DEFAULT_BUFFER_SIZE, None, errno.EBUSY)

    def resize_buffer(self, size_kb: int, cpu: int | None = None) -> None:
        """Resize the buffer of one CPU, or of all if `cpu` is None: execute a write to buffer_size_kb.

        Raises: KernelError EINVAL (the size is 0), ENOMEM (no memory, or a trace file is open for reading).
        Mirrors: kernel/trace/trace.c:tracing_entries_write (v6.1).
        """
        if not size_kb:
            raise KernelError(errno.EINVAL, "buffer_size_kb: the size is 0; write at least 1")
        self._resize((size_kb << 10) & ((1 << 64) - 1), cpu, errno.ENOMEM)

    def _resize(self, size: int, cpu: int | None, while_read: int) -> None:
        """Resize the buffer of one CPU, or of all if `cpu` is None, to at least `size` bytes per CPU.

        `while_read`: errno to raise if an open trace file reads one of the buffers.
        """
        self.system.lock.assert_held()
        order = self.order
        pages = pages_for(size, order)
        if not self._expands_alone:
            self.system.is_expanded = True
        changed = [self.buffers[n] for n in self._cpus(cpu) if self.buffers[n].nr_pages != pages]
        # Linux: a resize of all CPUs fails if a file reads any CPU's buffer, even if its size is unchanged.
        check_resizable(self.buffers if cpu is None else changed, while_read)
        old = [buffer.place for buffer in changed]
        try:
            memories = self.allocate([RingShape(pages, order)] * len(changed))
        except KernelError:
            self._resize_in_place(changed, pages)
        else:
            for buffer, memory in zip(changed, memories, strict=True):
                buffer.resize(buffer.place.moved_to(memory), pages)
            for memory in old:
                memory.release()
        self.note_sizes(cpu)

    def note_sizes(self, cpu: int | None = None) -> None:
        """Make buffer_size_kb show the current size of the buffer of one CPU, or of all if `cpu` is None.

        Mirrors: kernel/trace/trace.c:update_buffer_entries (v6.12).
        """
        for number in self._cpus(cpu):
            self._sizes[number] = self.buffers[number].size

    def _resize_in_place(self, buffers: list[RingBuffer], pages: int) -> None:
        """Resize `buffers` to `pages` sub-buffers each, after freeing their old memory.

        This method serves a resize for which the old and the new memory do not fit at the same time. During
        the resize, the records are in other memory of the process. If the process ends at that time, the
        records are lost.
        Raises: KernelError ENOMEM (the new memory alone does not fit either).
        """
        sizes = [memory_size(pages, self.order)] * len(buffers)
        with self.system.memory.exchanged([buffer.place for buffer in buffers], sizes) as memories:
            contents = [buffer.kept(pages) for buffer in buffers]
            for buffer, memory, content in zip(buffers, memories, contents, strict=True):
                buffer.resize(buffer.place.moved_to(memory), pages, content)

    def buffer_size_text(self, cpu: int | None = None) -> str:
        """Return the text of buffer_size_kb for one CPU or for all; it is "X" if the CPUs' sizes differ.

        As in Linux, a change of the sub-buffers' order does not change the text.
        """
        sizes = {self._sizes[number] >> 10 for number in self._cpus(cpu)}
        if len(sizes) > 1:
            return "X\n"
        note = f" (expanded: {DEFAULT_BUFFER_SIZE >> 10})"
        return f"{sizes.pop()}{'' if self.is_expanded or cpu is not None else note}\n"

    def buffer_total_size_text(self) -> str:
        """Return the text of buffer_total_size_kb."""
        total = sum(size >> 10 for size in self._sizes)
        full = (DEFAULT_BUFFER_SIZE >> 10) * self.system.cpus
        return f"{total}\n" if self.is_expanded else f"{total} (expanded: {full})\n"

    def _cpus(self, cpu: int | None) -> range:
        return range(self.system.cpus) if cpu is None else range(cpu, cpu + 1)
