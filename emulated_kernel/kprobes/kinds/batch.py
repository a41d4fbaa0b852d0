"""Registration of a sequence of probes of any kind. If one fails, none stays registered."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import TypeVar

from emulated_kernel.util.errors import KernelError

AnyProbe = TypeVar("AnyProbe")


def register_all(
    probes: Sequence[AnyProbe],
    register: Callable[[AnyProbe], None],
    unregister: Callable[[AnyProbe], None],
) -> None:
    """Register probes in order; if a registration fails, unregister the earlier probes.

    Raises: KernelError (as the failed registration), EINVAL (an empty sequence).
    Mirrors: kernel/kprobes.c:register_kprobes (v6.1).
    """
    if not probes:
        raise KernelError(errno.EINVAL, "no probes given")
    for done, probe in enumerate(probes):
        try:
            register(probe)
        except KernelError:
            for earlier in probes[:done]:
                unregister(earlier)
            raise
