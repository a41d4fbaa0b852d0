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
    """Maximum number of dynamic events of all kinds."""
    INSTANCES = "instances"
    """Maximum number of directories in tracing/instances."""
    OPEN_FILES = "open_files"
    """Maximum number of open files and directories of a mount. Files of machine/ can always be opened."""
    USER_OPEN_FILES = "user_open_files"
    """Maximum number of open files and directories of a user other than root.

    Files of machine/ can always be opened.
    """
    HIST_BYTES = "hist_bytes"
    """Maximum size of the host's memory for keys and variables of all histograms, in bytes."""
    SCRATCH_BYTES = "scratch_bytes"
    """Maximum size of the data in scratch/ and dev/, in bytes; data takes whole pages."""
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
"""Limit -> default value; None means that only memory limits the resource."""
ERRNO = {
    Limit.PROBES: errno.ENOSPC,
    Limit.INSTANCES: errno.ENOSPC,
    # Linux: the errno for fs.file-max, which also holds for all processes together.
    Limit.OPEN_FILES: errno.ENFILE,
    Limit.USER_OPEN_FILES: errno.ENFILE,
    Limit.HIST_BYTES: errno.ENOMEM,
}
"""Limit -> errno of a request that would exceed it. The guest enforces SCRATCH_BYTES itself, with ENOSPC."""
RECORD_BYTES = "record_bytes"
"""Name of the line in machine/limits for the memory of all ring buffers, whose limit cannot be set."""
UNLIMITED = "max"
_NUMBER = re.compile(r"[0-9]{1,20}")
_MOST = 1 << 48
_RUN_BUDGETS_MS = range(10, 600_001)
"""Allowed run budgets in milliseconds. While the guest loops, all clients wait for the run budget."""


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
        """Number of open files and directories, which the mount keeps up to date."""
        self.user_open_files = 0
        """Maximum of the numbers of open files of users other than root, which the mount keeps up to date."""

    def __getitem__(self, limit: Limit) -> int | None:
        return self._values[limit]

    def __setitem__(self, limit: Limit, value: int | None) -> None:
        self._values[limit] = value

    def check(self, limit: Limit, in_use: int) -> None:
        """Check that one more of a resource may be allocated; `in_use` are allocated already.

        Raises: KernelError ENOSPC, ENFILE, ENOMEM.
        """
        most = self._values[limit]
        if most is not None and in_use >= most:
            raise KernelError(ERRNO[limit], f"the limit of {limit.value} is reached: {most}")
