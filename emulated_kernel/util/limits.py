"""Limits: how much of one kernel its users may take; machine/limits shows and sets them."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from emulated_kernel.util.errors import KernelError


class Limit(Enum):
    """What is limited, by its name in machine/limits."""

    PROBES = "probes"
    """Dynamic events, of all kinds."""
    INSTANCES = "instances"
    OPEN_FILES = "open_files"
    """Open files and directories of a mount; those of machine/ are let in beyond it."""
    SCRATCH_BYTES = "scratch_bytes"
    """Of data in files of scratch/ and dev/, in whole pages."""
    RUN_BUDGET_MS = "run_budget_ms"
    """See MachineConfig.run_budget, which has it in seconds."""


DEFAULTS: Mapping[Limit, int | None] = MappingProxyType(
    {Limit.PROBES: 65536, Limit.INSTANCES: 1024, Limit.OPEN_FILES: 65536, Limit.SCRATCH_BYTES: None}
)
"""None: unlimited, as far as memory allows."""
ERRNO = {
    Limit.PROBES: errno.ENOSPC,
    Limit.INSTANCES: errno.ENOSPC,
    # Linux: for fs.file-max, which is one for all processes too.
    Limit.OPEN_FILES: errno.ENFILE,
}
"""Of what goes beyond a limit that the host keeps; that of scratch/ is kept by the guest, with ENOSPC."""
UNLIMITED = "max"
_NUMBER = re.compile(r"[0-9]{1,20}")
_MOST = 1 << 48
_RUN_BUDGETS_MS = range(10, 600_001)
"""A guest that loops keeps everybody waiting for so long."""


def parse_limit(name: str, text: str) -> tuple[Limit, int | None]:
    """A limit and its value, None for `max`. Raises: KernelError EINVAL, ERANGE."""
    try:
        limit = Limit(name)
    except ValueError:
        names = ", ".join(each.value for each in Limit)
        raise KernelError(errno.EINVAL, f"no limit {name!r}; there are {names}") from None
    if text == UNLIMITED and limit is not Limit.RUN_BUDGET_MS:
        return limit, None
    if not _NUMBER.fullmatch(text):
        words = "" if limit is Limit.RUN_BUDGET_MS else f" or {UNLIMITED}"
        raise KernelError(errno.EINVAL, f"{name}: {text!r} is no number{words}")
    allowed = _RUN_BUDGETS_MS if limit is Limit.RUN_BUDGET_MS else range(_MOST + 1)
    if int(text) not in allowed:
        raise KernelError(errno.ERANGE, f"{name}: {text} isn't from {allowed[0]} to {allowed[-1]}")
    return limit, int(text)


class Limits:
    """The limits of one mount, which stay when its kernel is booted anew.

    What is beyond a limit that was lowered stays as well; only more is refused.
    """

    def __init__(self, values: Mapping[Limit, int | None] = MappingProxyType({})) -> None:
        self._values = {**DEFAULTS, **values}
        self.open_files = 0
        """Counted by the mount."""

    def __getitem__(self, limit: Limit) -> int | None:
        return self._values[limit]

    def __setitem__(self, limit: Limit, value: int | None) -> None:
        self._values[limit] = value

    def check(self, limit: Limit, in_use: int) -> None:
        """Whether one more may come. Raises: KernelError ENOSPC, ENFILE."""
        most = self._values[limit]
        if most is not None and in_use >= most:
            raise KernelError(ERRNO[limit], f"the limit of {limit.value} is reached: {most}")
