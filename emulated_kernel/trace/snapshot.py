"""snapshot: a second set of buffers, which a trace array's events can be set aside in."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING

from emulated_kernel.errors import KernelError
from emulated_kernel.trace.ring_buffer import RingBuffer
from emulated_kernel.trace.ring_layout import MIN_PAGES, memory_size

if TYPE_CHECKING:
    from emulated_kernel.trace.trace_array import TraceArray

_ALL_HELP = """\
# echo 0 > snapshot : Clears and frees snapshot buffer
# echo 1 > snapshot : Allocates snapshot buffer, if not already allocated.
#                      Takes a snapshot of the main buffer.
# echo 2 > snapshot : Clears snapshot buffer (but does not allocate or free)
#                      (Doesn't have to be '2' works with any number that
#                       is not a '0' or '1')
"""
_CPU_HELP = """\
# echo 0 > snapshot : Invalid for per_cpu snapshot file.
# echo 1 > snapshot : Not supported with this kernel.
#                     Must use main snapshot file to allocate.
# echo 2 > snapshot : Clears this cpu's snapshot buffer (but does not allocate)
#                      (Doesn't have to be '2' works with any number that
#                       is not a '0' or '1')
"""


class Snapshot:
    """The snapshot of one trace array; without one it holds buffers of the smallest size.

    As built without per-CPU swapping. Mirrors: kernel/trace/trace.c:struct trace_array.max_buffer (v6.1).
    """

    def __init__(self, array: TraceArray) -> None:
        self._array = array
        self.is_allocated = False
        self.is_conditional: Callable[[], bool] = lambda: False
        """Whether a histogram says when it is taken; nobody else may change it then."""
        self.buffers = array.new_buffers(MIN_PAGES)

    def text(self, cpu: int | None = None) -> str:
        """The file: the events set aside, or how to set some aside."""
        cpus = range(len(self.buffers)) if cpu is None else (cpu,)
        if any(len(self.buffers[number]) for number in cpus):
            return self._array.trace_text(cpu, self.buffers)
        state = "allocated" if self.is_allocated else "freed"
        tracer = self._array.current_tracer
        return (
            f"# tracer: {tracer}\n#\n#\n# * Snapshot is {state} *\n#\n# Snapshot commands:\n"
            f"{_ALL_HELP if cpu is None else _CPU_HELP}"
        )

    def write(self, number: int, cpu: int | None = None) -> None:
        """Execute a write: 0 frees, 1 takes a snapshot, any other number clears it.

        Raises: KernelError EBUSY (it has a condition), EINVAL (0 or 1 for one CPU), ENOMEM.
        Mirrors: kernel/trace/trace.c:tracing_snapshot_write (v6.1).
        """
        if self.is_conditional():
            raise KernelError(errno.EBUSY, "a histogram takes the snapshots")
        if number in (0, 1) and cpu is not None:
            raise KernelError(errno.EINVAL, "not for one CPU alone")
        if number == 0:
            self.free()
        elif number == 1:
            self.allocate()
            self.take()
        else:
            self.clear(cpu)

    def allocate(self) -> None:
        """Give the snapshot the sizes that the array's buffers have. Raises: KernelError ENOMEM."""
        try:
            for number, buffer in enumerate(self._array.buffers):
                if self.buffers[number].nr_pages != buffer.nr_pages:
                    self._replace(number, buffer.nr_pages)
        except MemoryError as error:
            raise KernelError(errno.ENOMEM, str(error)) from error
        self.is_allocated = True

    def _replace(self, number: int, nr_pages: int) -> None:
        memory = self._array.system.allocate(memory_size(nr_pages))
        old = self.buffers[number].place
        self.buffers[number] = RingBuffer(old.moved_to(memory), nr_pages)
        old.release()

    def take(self) -> None:
        """Swap the array's buffers with the snapshot's, where one is allocated and tracing is on.

        Linux: what was in the snapshot comes back as the buffers' content.
        Mirrors: kernel/trace/trace.c:update_max_tr (v6.1).
        """
        array = self._array
        if not self.is_allocated or array.is_stopped:
            return
        array.buffers, self.buffers = self.buffers, array.buffers
        array.apply_switches()
        array.notify_rewired()
        array.notify()

    def clear(self, cpu: int | None = None) -> None:
        """Forget what was set aside, of one CPU or of all."""
        if self.is_allocated:
            for buffer in self.buffers if cpu is None else (self.buffers[cpu],):
                buffer.reset()

    def free(self) -> None:
        """Give the memory back."""
        if self.is_allocated:
            for number in range(len(self.buffers)):
                self._replace(number, MIN_PAGES)
            self.is_allocated = False
