"""unusable(): how everything in this package says that a file is no kernel that it can read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from emulated_kernel.util.errors import UnusableFile


def unusable(message: str) -> UnusableFile:
    """The error to raise: ENOEXEC, with what is wrong."""
    return UnusableFile("kernel", message)


@contextmanager
def read_as(what: str) -> Iterator[None]:
    """Around what reads a file that needn't be a kernel: errors say that it is no usable `what`."""
    try:
        yield
    except UnusableFile as error:
        raise UnusableFile(what, error.why) from None
