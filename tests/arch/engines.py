"""A pool of Unicorn engines, which tests use again instead of making new ones.

An engine with hooks is freed late because of reference cycles, and engines that wait to be freed slow down
new ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import unicorn

_FREE: dict[tuple[int, int], list[tuple[unicorn.Uc, Any]]] = defaultdict(list)
"""(architecture, mode) -> free engines, each with its initial registers."""
_LENT: dict[unicorn.Uc, tuple[int, int, Any]] = {}
_MOST_LENT = 100
"""Maximum number of engines that tests use at a time, unless a reference cycle keeps some of them alive.

Each engine takes some MiB of memory.
"""


def take(arch: int, mode: int) -> unicorn.Uc:
    """Return an engine in its initial state, which the caller gives back by give_back()."""
    free = _FREE[arch, mode]
    if free:
        uc, new = free.pop()
        uc.context_restore(new)
    else:
        uc = unicorn.Uc(arch, mode)
        new = uc.context_save()
    _LENT[uc] = arch, mode, new
    assert len(_LENT) < _MOST_LENT, "engines are not given back"
    return uc


def give_back(uc: Any) -> None:
    """Take back an engine for reuse, and remove its memory and hooks.

    Hazard: a hook must not refer to the caller, because the engine would keep the caller alive for ever.
    """
    arch, mode, new = _LENT.pop(uc)
    for hook in list(uc._callbacks):
        uc.hook_del(hook)
    for start, end, _ in list(uc.mem_regions()):
        uc.mem_unmap(start, end + 1 - start)
    uc.ctl_flush_tb()
    _FREE[arch, mode].append((uc, new))


@contextmanager
def lent(arch: int, mode: int) -> Iterator[unicorn.Uc]:
    """Yield an engine for the duration of the `with` block."""
    uc = take(arch, mode)
    try:
        yield uc
    finally:
        give_back(uc)
