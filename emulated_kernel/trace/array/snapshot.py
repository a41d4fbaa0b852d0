"""snapshot: a second set of buffers, which a trace array can swap with its own buffers to keep the events."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from emulated_kernel.trace.array.array_rings import ArrayRings, check_resizable
from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.trace.ring.ring_layout import MIN_PAGES, RingShape
from emulated_kernel.util.errors import KernelError

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
    """The snapshot of one trace array.

    While no snapshot is allocated, the snapshot's buffers have the smallest size. The snapshot file behaves
    as in a kernel built without CONFIG_RING_BUFFER_ALLOW_SWAP.
    Mirrors: kernel/trace/trace.h:struct trace_array.max_buffer (v6.1).
    """

    def __init__(self, array: ArrayRings) -> None:
        """Allocate the smallest buffers. Raises: KernelError ENOMEM (nothing stays allocated)."""
        self._array = array
        self.is_allocated = False
        self.condition: object = None
        """The histogram action that takes the snapshots, or None if no histogram takes snapshots.

        If the value is not None, writes to `snapshot` fail.
        """
        self.buffers = array.new_buffers(MIN_PAGES)
        self._mark()

    def _mark(self) -> None:
        """Mark in memory which buffers are the snapshot's, so that a later recovery of records knows it."""
        for mine, theirs in zip(self.buffers, self._array.buffers, strict=True):
            mine.is_aside = True
            theirs.is_aside = False

    def usage(self, tracer: str, cpu: int | None = None) -> str:
        """Return the text of the snapshot file while it holds no events: the commands that it accepts.

        `tracer`: name of the current tracer. `cpu`: CPU of the file, or None for the file of all CPUs.
        """
        state = "allocated" if self.is_allocated else "freed"
        return (
            f"# tracer: {tracer}\n#\n#\n# * Snapshot is {state} *\n#\n# Snapshot commands:\n"
            f"{_ALL_HELP if cpu is None else _CPU_HELP}"
        )

    def write(self, number: int, cpu: int | None = None) -> None:
        """Execute a write of `number`: 0 frees the snapshot, 1 takes a snapshot, any other number clears it.

        Raises: KernelError EBUSY (a histogram takes the snapshots), EINVAL (0 or 1 for one CPU), ENOMEM.
        Mirrors: kernel/trace/trace.c:tracing_snapshot_write (v6.1).
        """
        if self.condition is not None:
            raise KernelError(
                errno.EBUSY, "snapshot: a histogram takes the snapshots; remove its trigger first"
            )
        if number in (0, 1) and cpu is not None:
            raise KernelError(errno.EINVAL, "snapshot: 0 and 1 apply to all CPUs; use the main snapshot file")
        if number == 0:
            self.free()
        elif number == 1:
            self.allocate()
            self.take()
        else:
            self.clear(cpu)

    def allocate(self) -> None:
        """Resize the snapshot's buffers to the sizes of the trace array's buffers.

        Raises: KernelError ENOMEM, EBUSY (a size changes while a snapshot file is open).
        """
        shapes = [buffer.shape for buffer in self._array.buffers]
        changed = [cpu for cpu, shape in enumerate(shapes) if self.buffers[cpu].shape != shape]
        old = [self.buffers[cpu] for cpu in changed]
        check_resizable(old, errno.EBUSY)
        for cpu, buffer in zip(
            changed, self._array.reshape(old, [shapes[cpu] for cpu in changed]), strict=True
        ):
            self.buffers[cpu] = buffer
        self._mark()
        self.is_allocated = True

    def replace(self, buffers: Sequence[RingBuffer]) -> None:
        """Replace the snapshot's buffers by the empty buffers `buffers`."""
        self.buffers[:] = buffers
        self._mark()

    def take(self) -> None:
        """Swap the trace array's buffers with the snapshot's.

        Do nothing if no snapshot is allocated, or while a reader has stopped recording
        (ArrayRings.is_stopped).
        As in Linux, the events that the snapshot held become the content of the trace array's buffers.
        Mirrors: kernel/trace/trace.c:update_max_tr (v6.1).
        """
        array = self._array
        if not self.is_allocated or array.is_stopped:
            return
        array.note_recorded()
        array.buffers, self.buffers = self.buffers, array.buffers
        self._mark()
        array.apply_switches()
        array.notify_rewired()
        array.notify()

    def clear(self, cpu: int | None = None) -> None:
        """Remove the events from the snapshot's buffers: of one CPU, or of all CPUs if `cpu` is None.

        Do nothing if no snapshot is allocated.
        """
        if self.is_allocated:
            for buffer in self.buffers if cpu is None else (self.buffers[cpu],):
                buffer.reset()

    def free(self) -> None:
        """Replace the snapshot's buffers by empty buffers of the smallest size.

        While a file reads a buffer of the snapshot, the buffers keep their size, and are only emptied.
        """
        if not self.is_allocated:
            return
        if any(buffer.held for buffer in self.buffers):
            # Linux: a snapshot that is being read keeps its size, and the request to free it succeeds.
            self.clear()
            self.is_allocated = False
            return
        self.replace(self._array.reshape(self.buffers, [RingShape(MIN_PAGES)] * len(self.buffers)))
        self.is_allocated = False
