"""unusable(): the exception that this subpackage raises if a file isn't a readable kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from emulated_kernel.util.errors import UnusableFile


def unusable(message: str) -> UnusableFile:
    """Return the exception (ENOEXEC) for an unusable kernel file; `message` says what is wrong with it."""
    return UnusableFile("kernel", message)


@contextmanager
def read_as(what: str) -> Iterator[None]:
    """Make UnusableFile errors of the `with` block name `what`, such as "module (x)", not a kernel."""
    try:
        yield
    except UnusableFile as error:
        raise UnusableFile(what, error.why) from None
