"""Start of host threads, with ENOMEM if the host has no thread or memory left."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

from emulated_kernel.util.errors import KernelError


def start_thread(name: str, target: Callable[..., object], *arguments: object) -> threading.Thread:
    """Start a daemon thread, which calls `target` with `arguments`, and return the thread.

    A daemon thread doesn't keep the process alive. Raises: KernelError ENOMEM (no thread or memory is left).
    """
    try:
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise KernelError(errno.ENOMEM, f"the host has no thread for {name}") from error
    return thread
