"""machine/limits: a kernel's resource limits and the use of them, and commands that set the limits."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType

from emulated_kernel.components.records import KernelComponents
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.limits import RECORD_BYTES, Limit, Limits, limit_line, parse_limit
from emulated_kernel.vfs.core.command_file import SteppedFile, each_line
from emulated_kernel.vfs.core.node import Node
from emulated_kernel.vfs.core.seq_file import listing


@dataclass(frozen=True)
class GuestLimit:
    """A limit in machine/limits that only some kernels have."""

    show: Callable[[], str]
    """Function that returns the text that follows the limit's name in machine/limits.

    The text is the maximum, followed by a blank and the amount in use if the guest counts it.
    """
    set: Callable[[int | None], None]
    """Function that applies a new value of the limit; None means no limit."""


def limits_file(
    kernel: KernelComponents,
    limits: Limits,
    log: Callable[[str], None],
    further: Mapping[Limit, GuestLimit] = MappingProxyType({}),
) -> Node:
    """Return the file machine/limits, which shows and sets `limits`.

    `further`: limit that only the guest of this kernel has -> functions that show and set it. `log` writes
    the reason of a refused command to the kernel log.
    """
    file = _LimitsFile(kernel, limits, further)
    return SteppedFile(0o644, listing(file.lines), each_line(log, "limits", file.parsed))


class _LimitsFile:
    """Renders the lines of machine/limits, and executes its commands."""

    def __init__(self, kernel: KernelComponents, limits: Limits, further: Mapping[Limit, GuestLimit]) -> None:
        self._limits = limits
        self._further = further
        self._records = kernel.machine.records
        trace = kernel.tracing
        definitions = trace.system.filter_words.memory
        self._used: dict[Limit, Callable[[], int]] = {
            Limit.PROBES: lambda: trace.dynamic_events.count,
            Limit.INSTANCES: lambda: trace.arrays.limited,
            Limit.OPEN_FILES: lambda: limits.open_files,
            Limit.USER_OPEN_FILES: lambda: limits.user_open_files,
            Limit.HIST_BYTES: lambda: trace.arrays.hist_memory.used,
            Limit.USER_HIST_BYTES: lambda: trace.arrays.hist_memory.max_by_user,
            Limit.DEFINITION_BYTES: lambda: definitions.used,
            Limit.USER_DEFINITION_BYTES: lambda: definitions.max_by_user,
            Limit.USER_RECORD_BYTES: lambda: trace.arrays.record_memory.max_by_user,
        }
        # The kernel may have room for fewer probes or instances than the limit allows.
        self._room: dict[Limit, Callable[[], int]] = {
            Limit.PROBES: lambda: trace.system.events.free_ids,
            Limit.INSTANCES: lambda: self._records.room_for(*trace.arrays.instance_memory()),
        }

    def lines(self) -> Iterator[str]:
        """Yield a line for each limit: its name, its maximum and the amount in use.

        If the kernel has room for fewer probes or instances than the limit allows, the maximum is this lower
        number.
        """
        for limit, used in self._used.items():
            count = used()
            most = self._limits[limit]
            if limit in self._room:
                possible = count + self._room[limit]()
                most = possible if most is None else min(most, possible)
            yield limit_line(limit, most, count)
        yield f"{RECORD_BYTES} {self._records.pages_size} {self._records.pages_used}\n"
        for limit, guest_limit in self._further.items():
            yield f"{limit.value} {guest_limit.show()}\n"

    def parsed(self, line: str) -> Callable[[], None]:
        """Parse `NAME NUMBER` or `NAME max` and return a function that sets the limit.

        Raises: KernelError EINVAL (not such a line, or no such limit), ERANGE (the number is out of range).
        """
        words = line.split()
        if len(words) != 2:
            raise KernelError(errno.EINVAL, f"{line!r} isn't NAME VALUE")
        name, text = words
        limit, value = parse_limit(name, text, (*self._used, *self._further))
        return partial(self._set, limit, value)

    def _set(self, limit: Limit, value: int | None) -> None:
        if limit in self._further:
            self._further[limit].set(value)
        else:
            self._limits[limit] = value
