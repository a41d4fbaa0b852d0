"""PastRequests: a mount's record of refused requests and used file systems, for hints of `kprobefs run`."""

from __future__ import annotations

import errno

from emulated_kernel.util.errors import KernelError

MAX_TEXT = 4096
"""Maximum number of bytes of a refused write that are kept."""
_CLIENTS_OWN = ("scratch", "dev")
"""Directories of the root that hold clients' own files. Refused requests in them are not recorded."""


class PastRequests:
    """The file systems of a mount that clients have used, and the last requests that were refused."""

    def __init__(self) -> None:
        self.used: set[str] = set()
        """Prefixes of mounted file systems, such as /scratch, below which a client has used a path."""
        self.missing: str | None = None
        """Path of the last file that a client tried to create where clients cannot create files."""
        self.refused: tuple[str, str, str] | None = None
        """The last refused write to a control file: path, text and reason."""

    def creation_failed(self, path: str, error: KernelError) -> None:
        """Record that a client could not create the file `path`: open(2) with O_CREAT raised `error`.

        Ignore errors other than EACCES, and paths in the directories _CLIENTS_OWN.
        """
        if error.errno == errno.EACCES and _is_control(path):
            self.missing = path

    def write_failed(self, path: str, data: bytes, error: KernelError) -> None:
        """Record that a write of `data` to the file `path` raised `error`, if `path` is a control file."""
        if _is_control(path):
            text = bytes(memoryview(data)[:MAX_TEXT]).decode(errors="replace")
            self.refused = path, text, str(error.strerror)


def _is_control(path: str) -> bool:
    return path.split("/", 2)[1] not in _CLIENTS_OWN
