"""unusable(): the error that this subpackage raises if a file isn't a readable kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from emulated_kernel.util.errors import UnusableFile


def unusable(message: str) -> UnusableFile:
    """Return the exception to raise, ENOEXEC; `message` says what is wrong with the kernel."""
    return UnusableFile("kernel", message)


@contextmanager
def read_as(what: str) -> Iterator[None]:
    """Let UnusableFile errors of the block name `what` (such as "module (x)") in place of a kernel."""
    try:
        yield
    except UnusableFile as error:
        raise UnusableFile(what, error.why) from None
