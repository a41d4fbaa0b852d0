"""machine/limits: shows the kernel's resource limits and their use; commands set the limits."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from functools import partial

from emulated_kernel.guests.builtin.kernel_components import BuiltinKernelComponents
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.limits import RECORD_BYTES, UNLIMITED, Limit, parse_limit


def limit_lines(kernel: BuiltinKernelComponents) -> Iterator[str]:
    """Yield a line for each resource limit: its name, the maximum that is possible now, the amount in use."""
    limits = kernel.config.limits
    trace = kernel.tracing
    records = kernel.machine.records
    used = {
        Limit.PROBES: trace.dynamic_events.count,
        Limit.INSTANCES: trace.arrays.limited,
        Limit.OPEN_FILES: limits.open_files,
        Limit.USER_OPEN_FILES: limits.user_open_files,
        Limit.HIST_BYTES: trace.arrays.hist_memory.used,
        Limit.SCRATCH_BYTES: kernel.guest.kernel.file_pages() * PAGE_SIZE,
    }
    # What the kernel itself has room for may be less than the limit.
    room = {
        Limit.PROBES: trace.system.events.ids_left,
        Limit.INSTANCES: records.room_for(*trace.arrays.instance_memory()),
    }
    for limit, count in used.items():
        most = limits[limit]
        if limit in room:
            most = count + room[limit] if most is None else min(most, count + room[limit])
        yield f"{limit.value} {UNLIMITED if most is None else most} {count}\n"
    yield f"{RECORD_BYTES} {records.pages_size} {records.pages_used}\n"
    yield f"{Limit.RUN_BUDGET_MS.value} {round(kernel.machine.run_budget * 1000)}\n"


def parsed_limit(kernel: BuiltinKernelComponents, line: str) -> Callable[[], None]:
    """Parse a command `NAME NUMBER` or `NAME max` and return a function that sets the limit.

    Raises: KernelError EINVAL, ERANGE.
    """
    words = line.split()
    if len(words) != 2:
        raise KernelError(errno.EINVAL, f"{line!r} isn't NAME VALUE")
    return partial(_set_limit, kernel, *parse_limit(*words))


def _set_limit(kernel: BuiltinKernelComponents, limit: Limit, value: int | None) -> None:
    if limit is Limit.RUN_BUDGET_MS:
        assert value is not None
        kernel.machine.run_budget = value / 1000
        return
    if limit is Limit.SCRATCH_BYTES:
        kernel.guest.kernel.limit_file_pages(None if value is None else value // PAGE_SIZE)
    kernel.config.limits[limit] = value
