"""Calls of guest functions by the host: a guest that fails in one is not an error of kprobefs."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from emulated_kernel.machine.traps.trap import GuestFault, MemoryFault
from emulated_kernel.util.errors import KernelError


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Turn a fault in the block into an errno; `what` names the guest's data that the block reads.

    Raises: KernelError EIO.
    """
    try:
        yield
    except (MemoryFault, GuestFault) as fault:
        raise KernelError(errno.EIO, f"the {what} leads to {fault}") from fault
