"""Which CPUs of a trace array have a reader of trace_pipe."""

from __future__ import annotations

import errno

from emulated_kernel.errors import KernelError


class PipeUsers:
    """Who reads which CPU's events: one reader each, and none beside one of all CPUs.

    Mirrors: kernel/trace/trace.c:open_pipe_on_cpu, close_pipe_on_cpu (v6.1)
    """

    def __init__(self) -> None:
        self._all = False
        self._cpus: set[int] = set()

    def acquire(self, cpu: int | None) -> None:
        """Take one CPU, or all. Raises: KernelError EBUSY."""
        if self._all or (self._cpus if cpu is None else cpu in self._cpus):
            raise KernelError(errno.EBUSY, "trace_pipe is open already")
        if cpu is None:
            self._all = True
        else:
            self._cpus.add(cpu)

    def release(self, cpu: int | None) -> None:
        """Give back what acquire() took."""
        if cpu is None:
            self._all = False
        else:
            self._cpus.discard(cpu)
