"""Reading the guest's own data: what the guest did to it must not look like a fault of kprobefs."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from emulated_kernel.machine.traps.trap import GuestFault, MemoryFault
from emulated_kernel.util.errors import KernelError


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Turn a fault while the guest's `what` is read into an errno.

    Raises: KernelError EIO.
    """
    try:
        yield
    except (MemoryFault, GuestFault) as fault:
        raise KernelError(errno.EIO, f"the {what} leads to {fault}") from fault
