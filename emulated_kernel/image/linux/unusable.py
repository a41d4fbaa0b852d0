"""Exceptions and error texts of this subpackage for a file that isn't a readable kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from emulated_kernel.util.errors import UnusableFile

_UPPER_HALF = (1 << 17) - 1
"""Value of the bits 47 to 63 of a canonical address in the upper half, which belongs to the kernel."""


def unusable(message: str) -> UnusableFile:
    """Return the exception (ENOEXEC) for an unusable kernel file; `message` says what is wrong with it."""
    return UnusableFile("kernel", message)


def unmapped(va: int) -> str:
    """Return an error text about a kernel's pointer to `va`, which is not in the kernel's memory.

    The text contains `va` only if `va` is a canonical address. Any other value comes from damage or is poison
    of freed memory.
    """
    if va >> 47 in (0, _UPPER_HALF):
        return f"{va:#x} is not in its memory"
    return "a pointer in its structures is damaged"


@contextmanager
def read_as(what: str) -> Iterator[None]:
    """Replace "kernel" by `what`, such as "module (x)", in UnusableFile errors of the `with` block."""
    try:
        yield
    except UnusableFile as error:
        raise UnusableFile(what, error.why) from None
