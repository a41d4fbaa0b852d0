"""KernelError, which carries an errno, and exceptions for operations that the caller must try again."""

from __future__ import annotations

import errno as errno_module
import os

_LINUX_NAMES = {errno_module.EDEADLK: "EDEADLK", errno_module.EOPNOTSUPP: "EOPNOTSUPP"}
"""errno -> name in Linux, for the numbers to which errno.errorcode gives a different name."""


def errno_name(number: int) -> str:
    """Return Linux's name of the errno `number`, such as "EOPNOTSUPP", or its digits if it has no name."""
    return _LINUX_NAMES.get(number) or errno_module.errorcode.get(number, str(number))


class KernelError(OSError):
    """Error of a call to the emulated kernel, with its errno.

    The exception is raised where the error is found. A process sees only the errno; `message` is for logs and
    Python callers.
    """

    errno: int

    def __init__(self, errno: int, message: str = "") -> None:
        super().__init__(errno, message or os.strerror(errno))

    @property
    def name(self) -> str:
        """The errno's symbolic name, such as "EINVAL"."""
        return errno_name(self.errno)


class UnusableFile(KernelError):
    """KernelError ENOEXEC: a file or memory has the wrong format or is damaged."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(errno_module.ENOEXEC, f"not a usable {what}: {why}")
        self.why = why


class WouldBlock(Exception):
    """An operation has no data yet; the caller waits and tries again, or returns EAGAIN."""


class YieldLock(WouldBlock):
    """A long operation is partly done; the caller releases the control lock for a moment and tries again."""


def checked_count(count: int, room: int) -> int:
    """Return `count`, the number of bytes or entries that the guest reports, after checking its range.

    Hazard: a damaged or hostile guest can report any number. An unchecked copy would overwrite host memory.
    Raises: KernelError EIO (negative, or more than the `room` bytes or entries of the buffer).
    """
    if not 0 <= count <= room:
        raise KernelError(errno_module.EIO, f"the guest reports {count} bytes or entries where {room} fit")
    return count
