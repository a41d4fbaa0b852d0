"""Turns faults at damaged data of the guest into EIO: kprobefs has not caused these faults."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from emulated_kernel.machine.traps.trap import GuestFault, MemoryFault
from emulated_kernel.util.errors import KernelError


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Turn a fault of the `with` block into EIO; `what` names the guest's data that the block reads.

    Raises: KernelError EIO.
    """
    try:
        yield
    except (MemoryFault, GuestFault) as fault:
        raise KernelError(errno.EIO, f"the {what} leads to {fault}") from fault
