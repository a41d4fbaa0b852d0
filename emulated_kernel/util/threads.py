"""Threads of the host's: where it has none left, or no memory for one, whoever asked for it gets ENOMEM."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

from emulated_kernel.util.errors import KernelError


def start_thread(name: str, target: Callable[..., object], *arguments: object) -> threading.Thread:
    """A started one, which keeps no process from its end. Raises: KernelError ENOMEM (none started)."""
    try:
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise KernelError(errno.ENOMEM, f"the host has no thread for {name}") from error
    return thread
