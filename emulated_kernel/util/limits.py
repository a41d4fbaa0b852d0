"""Resource limits of one kernel, which machine/limits shows and sets."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType

from emulated_kernel.util.errors import KernelError


class Limit(Enum):
    """A limited resource; the value is its name in machine/limits."""

    PROBES = "probes"
    """Dynamic events of all kinds."""
    INSTANCES = "instances"
    """Instances of tracing."""
    OPEN_FILES = "open_files"
    """Open files and directories of a mount; files of machine/ can be opened beyond the limit."""
    USER_OPEN_FILES = "user_open_files"
    """Open files and directories of one user except root; files of machine/ are excepted as well."""
    HIST_BYTES = "hist_bytes"
    """Bytes of the host's memory that all histograms occupy, as far as they grow with keys and variables."""
    SCRATCH_BYTES = "scratch_bytes"
    """Bytes of data in files of scratch/ and dev/, in whole pages."""
    RUN_BUDGET_MS = "run_budget_ms"
    """MachineConfig.run_budget in milliseconds."""


DEFAULTS: Mapping[Limit, int | None] = MappingProxyType(
    {
        Limit.PROBES: 65536,
        Limit.INSTANCES: 1024,
        Limit.OPEN_FILES: 65536,
        Limit.USER_OPEN_FILES: 16384,
        Limit.HIST_BYTES: 512 << 20,
        Limit.SCRATCH_BYTES: None,
    }
)
"""Default limits; None means no limit except memory."""
ERRNO = {
    Limit.PROBES: errno.ENOSPC,
    Limit.INSTANCES: errno.ENOSPC,
    # Linux: the errno for fs.file-max, which also holds for all processes together.
    Limit.OPEN_FILES: errno.ENFILE,
    Limit.USER_OPEN_FILES: errno.ENFILE,
    Limit.HIST_BYTES: errno.ENOMEM,
}
"""Limit -> errno when it is exceeded. The guest itself enforces SCRATCH_BYTES, with ENOSPC."""
RECORD_BYTES = "record_bytes"
"""Name of the line about the memory of all ring buffers and snapshots, which the machine limits."""
UNLIMITED = "max"
_NUMBER = re.compile(r"[0-9]{1,20}")
_MOST = 1 << 48
_RUN_BUDGETS_MS = range(10, 600_001)
"""Allowed run budgets in milliseconds; all clients wait that long for a looping guest."""


def parse_limit(name: str, text: str, offered: Sequence[Limit] = tuple(Limit)) -> tuple[Limit, int | None]:
    """Parse the name of one of the `offered` limits and its value, which is None for `max`.

    Raises: KernelError EINVAL, ERANGE.
    """
    if name == RECORD_BYTES:
        raise KernelError(errno.EINVAL, f"{name}: the machine has a fixed size; choose smaller buffers")
    limit = next((each for each in offered if each.value == name), None)
    if limit is None:
        names = ", ".join(each.value for each in offered)
        raise KernelError(errno.EINVAL, f"{name}: no such limit; choose from {names}")
    if text == UNLIMITED and limit is not Limit.RUN_BUDGET_MS:
        return limit, None
    if not _NUMBER.fullmatch(text):
        words = "" if limit is Limit.RUN_BUDGET_MS else f" or {UNLIMITED}"
        raise KernelError(errno.EINVAL, f"{name}: {text!r} is not a number{words}")
    allowed = _RUN_BUDGETS_MS if limit is Limit.RUN_BUDGET_MS else range(_MOST + 1)
    if int(text) not in allowed:
        raise KernelError(errno.ERANGE, f"{name}: {text} is out of range; use {allowed[0]} to {allowed[-1]}")
    return limit, int(text)


class Limits:
    """Limits of one mount; they persist when its kernel is rebooted.

    Lowering a limit frees nothing that is in use; it only refuses new allocations.
    """

    def __init__(self, values: Mapping[Limit, int | None] = MappingProxyType({})) -> None:
        self._values = {**DEFAULTS, **values}
        self.open_files = 0
        """Number of open files, which the mount counts."""
        self.user_open_files = 0
        """Number of open files of the user who has most of them, except root; the mount counts them."""

    def __getitem__(self, limit: Limit) -> int | None:
        return self._values[limit]

    def __setitem__(self, limit: Limit, value: int | None) -> None:
        self._values[limit] = value

    def check(self, limit: Limit, in_use: int) -> None:
        """Check that one more than `in_use` is allowed. Raises: KernelError ENOSPC, ENFILE, ENOMEM."""
        most = self._values[limit]
        if most is not None and in_use >= most:
            raise KernelError(ERRNO[limit], f"the limit of {limit.value} is reached: {most}")
