"""File access to the two kernels: the distribution's kernel in the emulator, and the built-in kernel."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.boot_cache import started
from emulated_kernel.guests.linux.mounts.native_mount import native_mount
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.errors import KernelError, WouldBlock
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.mount import Mount
from stress.differential.steps import Case, Step
from tests.guests.linux.parts import guest_of

PID, COMM = 4001, "client"
PROBED_FILES = ("/etc/passwd", "/etc/group")
"""Files for uprobes. They exist on the host, and linux() creates them in the distribution's guest."""
_CLIENT = Client(PID, 0, 0)
_PIECE = 1 << 17
_CLEARED = 8192
_MAX = 4 << 20
"""Maximum number of bytes that are read from a file without an end."""


class _Host(ProcessWatch):
    def comm(self, pid: int) -> str | None:
        return COMM if pid == PID else None


@dataclass
class Side:
    """One of the two kernels, on which the client's steps are executed.

    An answer is a text: the contents of a file, an empty string, or the name of an errno.
    """

    mount: Mount | Mount
    close: Callable[[], None]

    def do(self, step: Step) -> str:
        """Execute a step, and return the answer."""
        try:
            return VERBS[step.verb](
                self, step.path if step.path[:1] == "/" else f"/tracing/{step.path}", step.text
            )
        except KernelError as error:
            return errno.errorcode[error.errno or 0]
        except WouldBlock:
            return "would block"

    def run(self, case: Case) -> list[str]:
        """Execute the steps of a case, and return the answers."""
        return [self.do(step) for step in case]

    def _opened(self, path: str, flags: int, text: str) -> str:
        handle = self.mount.open(_CLIENT, path, flags)
        try:
            if text:
                data = text.encode("latin-1")
                count = self.mount.write(_CLIENT, handle, data, 0)
                return "" if count == len(data) else f"{count} of {len(data)}"
        finally:
            self.mount.release(handle)
        return ""

    def write(self, path: str, text: str) -> str:
        """Open a file, and write the text with one system call."""
        return self._opened(path, os.O_WRONLY, text)

    def append(self, path: str, text: str) -> str:
        """Open a file with O_APPEND, and write the text with one write(2)."""
        return self._opened(path, os.O_WRONLY | os.O_APPEND, text)

    def truncate(self, path: str, text: str) -> str:
        """Open a file with O_TRUNC, and write the text with one write(2), unless it is empty."""
        return self._opened(path, os.O_WRONLY | os.O_TRUNC, text)

    def read(self, path: str, _text: str) -> str:
        """Return the contents of a file; if an error ends the read, append its name in parentheses."""
        handle, data = self.mount.open(_CLIENT, path, os.O_RDONLY | os.O_NONBLOCK), b""
        try:
            while len(data) < _MAX and (piece := self.mount.read(_CLIENT, handle, _PIECE, len(data))):
                data += piece
        except WouldBlock:
            data += b"(would block)"
        except KernelError as error:
            data += f"({error.name})".encode()
        finally:
            self.mount.release(handle)
        return data.decode("latin-1")

    def list(self, path: str, _text: str) -> str:
        """Return the sorted names in a directory, one a line."""
        return "\n".join(sorted(entry.name for entry in self.mount.readdir(path)))

    def mkdir(self, path: str, _text: str) -> str:
        """Create a directory."""
        self.mount.mkdir(_CLIENT, path, 0o755)
        return ""

    def rmdir(self, path: str, _text: str) -> str:
        """Remove an empty directory."""
        self.mount.rmdir(_CLIENT, path)
        return ""

    def rename(self, path: str, text: str) -> str:
        """Rename a file to the path `text`."""
        self.mount.rename(_CLIENT, path, text)
        return ""

    def unlink(self, path: str, _text: str) -> str:
        """Remove a file."""
        self.mount.unlink(_CLIENT, path)
        return ""

    def create(self, path: str, text: str) -> str:
        """Create a file, and write the text to it."""
        handle = self.mount.create(_CLIENT, path, 0o644, os.O_WRONLY | os.O_TRUNC)
        try:
            if text:
                self.mount.write(_CLIENT, handle, text.encode("latin-1"), 0)
        finally:
            self.mount.release(handle)
        return ""

    def untrigger(self, path: str, _text: str) -> str:
        """Remove all triggers of an event, in reverse order; return the remaining ones."""
        with suppress(KernelError):
            self.truncate(path, "")
        for line in reversed(self._triggers(path)):
            with suppress(KernelError):
                self.write(path, f"!{line}")
        return "\n".join(self._triggers(path))

    def _triggers(self, path: str) -> list[str]:
        return [line for line in self.read(path, "").splitlines() if line and line[0] != "#"]

    def uncommand(self, path: str, _text: str) -> str:
        """Remove all commands from a function filter."""
        lines = [line for line in self.read(path, "").splitlines() if line[0] != "#" and ":" in line]
        for line in lines:
            command, _, limit = line.rpartition(":")
            # A command with a limit is removed with any limit instead of none.
            self.write(path, f"!{command}{'' if limit == 'unlimited' else ':0'}\n")
        return ""


VERBS: Final[dict[str, Callable[[Side, str, str], str]]] = {
    method.__name__: method
    for method in (
        Side.write, Side.append, Side.truncate, Side.read, Side.list, Side.mkdir, Side.rmdir, Side.rename,
        Side.unlink, Side.create, Side.untrigger, Side.uncommand,
    )
}  # fmt: skip


def linux(image: str, seed: int = 1) -> Side:
    """Start the kernel in the file `image`, a vmlinuz, a vmlinux or a package, and return its Side."""
    tasks = started(image, seed)
    mount = native_mount(tasks, _Host(), Owner(0, 0), is_tracefs=False)
    init, put = tasks.init, tasks.copy_to_user
    # In both kernels, a zero byte follows the client's data in its memory, so that probes fetch no old data.
    tasks.copy_to_user = lambda task, address, data: put(task, address, data + b"\0")
    syscalls = guest_of(mount).syscalls
    syscalls.on_path(init, "mkdirat", os.path.dirname(PROBED_FILES[0]), 0o755)
    for path in PROBED_FILES:
        guest_of(mount).syscalls.close(
            init, guest_of(mount).syscalls.open(init, path, os.O_CREAT | os.O_WRONLY, 0o644)
        )
    return Side(mount, mount.close)


def ours() -> Side:
    """Start the built-in kernel, and return its Side."""
    kernel = Kernel(watch=_Host())
    buffers, get = kernel.guest.syscalls._buffers, kernel.guest.syscalls._buffers.get

    def cleared() -> int:
        address = get()
        kernel.guest.syscalls._memory.write(address, bytes(_CLEARED))
        return address

    buffers.get = cleared
    return Side(kernel.mount(), kernel.close)
