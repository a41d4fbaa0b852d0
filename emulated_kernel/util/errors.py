"""KernelError: a rule of the kernel was broken; it carries the errno that write(2) and friends return."""

from __future__ import annotations

import errno as errno_module
import os

_LINUX_NAMES = {errno_module.EDEADLK: "EDEADLK", errno_module.EOPNOTSUPP: "EOPNOTSUPP"}
"""Where Python's table has another one for the same number."""


class KernelError(OSError):
    """An errno of the emulated kernel, raised where the rule is known.

    `message` is for logs and Python callers; the errno is what a process sees.
    """

    errno: int

    def __init__(self, errno: int, message: str = "") -> None:
        super().__init__(errno, message or os.strerror(errno))

    @property
    def name(self) -> str:
        """The errno's symbolic name, as in "EINVAL"."""
        return _LINUX_NAMES.get(self.errno) or errno_module.errorcode.get(self.errno, str(self.errno))


class UnusableFile(KernelError):
    """ENOEXEC: a file, or memory, isn't what it is to be, or is damaged."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(errno_module.ENOEXEC, f"not a usable {what}: {why}")
        self.why = why


class WouldBlock(Exception):
    """An operation has nothing to give yet; the caller waits and tries again, or answers EAGAIN."""


class YieldLock(WouldBlock):
    """An operation is done in part: others may have the control lock, and then it is to be asked again."""


def checked_count(count: int, room: int) -> int:
    """Bytes or entries that a guest says it has given, where it was asked for `room` at most.

    Hazard: a damaged or hostile one says anything, and who copies as much writes over the host's memory.
    Raises: KernelError EIO (more).
    """
    if not 0 <= count <= room:
        raise KernelError(errno_module.EIO, f"the guest says that it gave {count} of {room} bytes")
    return count
