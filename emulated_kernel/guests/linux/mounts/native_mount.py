"""native_mount: a mount that shows the guest's own tracefs and debugfs, and machine/, which the host adds."""

from __future__ import annotations

import errno
import json
import os
import select
import stat
from collections.abc import Callable
from typing import IO

from emulated_kernel.guests.common.gdb_file import gdb_path
from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.common.vmcore_file import MAX_OPEN, write_core
from emulated_kernel.guests.linux.guest.cpu_report import cpu_text
from emulated_kernel.guests.linux.guest.passing_time import PassingTime, RealTime
from emulated_kernel.guests.linux.guest.tasks import LinuxTasks
from emulated_kernel.guests.linux.initramfs import DEBUGFS, TRACEFS
from emulated_kernel.guests.linux.mounts.guest_fs import GuestFs
from emulated_kernel.guests.linux.mounts.guest_paths import (
    CPU,
    DMESG,
    FORWARDED,
    GDB,
    HISTORY,
    LASTING,
    LIMITS,
    LINKED,
    LOAD,
    MACHINE,
    MODULES,
    TOPS,
    VMCORE,
)
from emulated_kernel.guests.linux.mounts.linux_guest import LinuxGuest
from emulated_kernel.guests.linux.mounts.native_core import NativeCore
from emulated_kernel.image.linux.module_files import ModuleFiles
from emulated_kernel.machine.core_dump import RAM_OFFSET
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.limits import Limits
from emulated_kernel.vfs.core.client import Client, DirEntry, Stat
from emulated_kernel.vfs.core.kstrtox import ascii_lines
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.core.past_requests import PastRequests
from emulated_kernel.vfs.filesystem import FileDescription, FileSystem
from emulated_kernel.vfs.mount import Mount

_PRIVATE = (GDB, HISTORY)
"""Paths of files of machine/, besides vmcore, that only root and the mount's owner can read."""
_HOST_INO = 1 << 40
"""First inode number of the files that the host adds to the mount; the guest does not have them."""


class _ModulesFile(FileDescription):
    """An open file of machine/modules that takes commands."""

    __slots__ = ()

    fs: ModulesFs

    @property
    def reads_host(self) -> bool:
        """Whether a write reads files of the host; see FileDescription."""
        return True

    def write(self, client: Client, data: bytes, offset: int) -> int:
        """Execute the command in `data`, which loads or unloads modules; see FileDescription.

        The module files are read first, without the control lock. Return the number of bytes written.
        """
        del offset
        change = self.fs.guest.prepared_modules(client, data)
        with self.fs.request(client):
            return change()

    def fsync(self, client: Client, *, only_data: bool) -> None:
        """Do nothing: write(2) returns only after it has executed the command."""


class ModulesFs(GuestFs):
    """File system of machine/modules.

    Reads return the guest's /proc/modules; writes are executed as commands.
    """

    def _shown(self, found: Stat) -> Stat:
        shown = super()._shown(found)
        return shown._replace(mode=shown.mode | stat.S_IWUSR)

    def open(self, client: Client, path: str, flags: int) -> FileDescription:
        """Open a file; see FileSystem.

        Only root and the mount's owner may open the file for writing, and only with O_WRONLY.

        Raises: KernelError EACCES (any other open for writing).
        """
        if not flags & os.O_ACCMODE:
            return super().open(client, path, flags)
        if flags & os.O_ACCMODE != os.O_WRONLY or client.uid not in (0, self.guest.owner.uid):
            raise KernelError(errno.EACCES)
        file = _ModulesFile(self, path, flags)
        self.opened[file] = None
        return file


class _TextFile(FileDescription):
    """An open file of machine/. Its content was computed when it was opened."""

    __slots__ = ("_text",)

    def __init__(self, fs: FileSystem, path: str, flags: int, text: bytes) -> None:
        super().__init__(fs, path, flags)
        self._text = text

    def read(self, client: Client, size: int, offset: int) -> bytes:
        """Read from the open file, even if the guest has died; see FileDescription. Lock: not used."""
        del client
        return self._text[offset : offset + size]

    def poll(self, notify: Callable[[], None] | None) -> int:
        """Return the ready events as a poll mask; see FileDescription."""
        del notify
        return select.POLLIN | select.POLLRDNORM

    def fsync(self, client: Client, *, only_data: bool) -> None:
        """Do nothing: the file is read-only."""


class _HistoryFile(FileDescription):
    """An open file of machine/history. Each read creates the content again from the record of requests."""

    __slots__ = ()

    fs: MachineFs

    def read(self, client: Client, size: int, offset: int) -> bytes:
        """Read from the history, even if the guest has died; see FileDescription. Lock: not used."""
        del client
        return self.fs.history()[offset : offset + size]

    def fsync(self, client: Client, *, only_data: bool) -> None:
        """Do nothing: the file is read-only."""


class _LoadFile(FileDescription):
    """An open file of machine/load that takes commands."""

    __slots__ = ()

    fs: MachineFs

    def write(self, client: Client, data: bytes, offset: int) -> int:
        """Execute the lines of `data`, which start or stop workloads, and return the size of `data`.

        No line is executed before all lines have been parsed.
        """
        del client, offset
        guest = self.fs.guest
        try:
            with guest.running:
                for command in [guest.loads.parsed(line) for line in ascii_lines(data)]:
                    command()
        except KernelError as error:
            guest.say(f"load: {error.strerror}")
            raise
        return len(data)

    def fsync(self, client: Client, *, only_data: bool) -> None:
        """Do nothing: write(2) returns only after it has executed the commands."""


class _CoreFile(FileDescription):
    """An open ELF core, which has the guest's memory and registers at the time of the open."""

    __slots__ = ("_core",)

    fs: MachineFs

    def __init__(self, fs: MachineFs, path: str, flags: int, core: IO[bytes]) -> None:
        super().__init__(fs, path, flags)
        self._core = core

    def read(self, client: Client, size: int, offset: int) -> bytes:
        """Read from the core; see FileDescription. Lock: not used."""
        del client
        return os.pread(self._core.fileno(), size, offset)

    def fsync(self, client: Client, *, only_data: bool) -> None:
        """Do nothing: the file is read-only."""

    def release(self) -> None:
        """Free the temporary file; see FileDescription."""
        super().release()
        self._core.close()
        self.fs.open_cores -= 1


class MachineFs(FileSystem):
    """File system of machine/: cpu, dmesg, gdb, history, limits, load (starts workloads) and vmcore.

    The directory also has files of the guest's /proc. Another file system shows these files; see
    guest_paths.FORWARDED.
    """

    guest: LinuxGuest

    def __init__(self, guest: LinuxGuest, limits: Limits, past: Callable[[], PastRequests]) -> None:
        """Create the file system.

        `limits`: the limits that machine/limits shows. `past`: returns the mount's record of past requests.
        """
        super().__init__(guest.lock)
        self.guest = guest
        self.past = past
        self._texts: dict[str, Callable[[], bytes]] = {
            DMESG: self._log,
            CPU: lambda: cpu_text(guest.tasks).encode(),
            LIMITS: lambda: "".join(limits.open_file_lines()).encode(),
            LOAD: lambda: "".join(guest.loads.text()).encode(),
            HISTORY: self.history,
        }
        """Path of a file -> function that returns its text."""
        self._core = NativeCore(guest.tasks)
        show_socket = gdb_path(self._core, guest.lock)
        self._texts[GDB] = lambda: show_socket().encode()
        self.open_cores = 0
        """Number of open files of machine/vmcore."""

    def history(self) -> bytes:
        """Return the content of machine/history.

        It is a line of JSON with the fields of PastRequests: the prefixes of the file systems that clients
        have used, the last refused creation, and the last refused write. Events are left out, because the
        guest's own tracefs has them.
        """
        past = self.past()
        first = {
            "is_partial": True,
            "used": sorted(past.used),
            "missing": past.missing,
            "refused": past.refused,
        }
        return f"{json.dumps(first)}\n".encode()

    def _log(self) -> bytes:
        with self.guest.running:
            return self.guest.log_text()

    def getattr(self, path: str, client: Callable[[], Client] | None = None) -> Stat:
        """Return a file's attributes; see FileSystem. Lock: not used."""
        del client
        owner = self.guest.owner
        if path == MACHINE:
            return Stat(_HOST_INO, stat.S_IFDIR | 0o755, 2, owner.uid, owner.gid)
        if path == VMCORE:
            core = RAM_OFFSET + len(self._core.ram)
            return Stat(self._number(path), stat.S_IFREG | 0o400, 1, owner.uid, owner.gid, size=core)
        mode = {LOAD: 0o644}.get(path, 0o400 if path in _PRIVATE else 0o444)
        return Stat(self._number(path), stat.S_IFREG | mode, 1, owner.uid, owner.gid)

    def _number(self, path: str) -> int:
        """Return the inode number of the file at `path`. Raises: KernelError ENOENT (no such file)."""
        if path not in self._names:
            raise KernelError(errno.ENOENT, path)
        return _HOST_INO + 1 + self._names.index(path)

    @property
    def _names(self) -> list[str]:
        """Paths of all files that this file system shows."""
        return [*self._texts, VMCORE]

    def is_always_open(self, path: str) -> bool:
        """Return True: the limit of open files does not apply to these files; see FileSystem."""
        del path
        return True

    def readdir(self, path: str, client: Client | None = None) -> list[DirEntry]:
        """Return the entries of a directory; see FileSystem. Lock: not used."""
        del client
        if path != MACHINE:
            raise KernelError(errno.ENOTDIR, path)
        return [
            DirEntry(".", stat.S_IFDIR, _HOST_INO),
            DirEntry("..", stat.S_IFDIR, _HOST_INO),
            *(DirEntry(each.rpartition("/")[2], stat.S_IFREG, self._number(each)) for each in self._names),
        ]

    def open(self, client: Client, path: str, flags: int) -> FileDescription:
        """Open a file; see FileSystem.

        Only `load` can be opened for writing, and only with O_WRONLY. Only root and the mount's owner can
        open `gdb`, `history` and `vmcore`, or open `load` for writing.
        Raises: KernelError EACCES (any other open), ENOENT (no such file), and for `vmcore` the errors of
        _open_core().
        """
        self.getattr(path)
        file: FileDescription
        if path == VMCORE:
            file = self._open_core(client, flags)
        elif flags & os.O_ACCMODE == os.O_RDONLY and (
            path not in _PRIVATE or self.guest.owner.is_privileged(client)
        ):
            file = (
                _HistoryFile(self, path, flags)
                if path == HISTORY
                else _TextFile(self, path, flags, self._texts[path]())
            )
        elif path == LOAD and flags & os.O_ACCMODE == os.O_WRONLY and self.guest.owner.is_privileged(client):
            file = _LoadFile(self, path, flags)
        else:
            raise KernelError(errno.EACCES, path)
        self.opened[file] = None
        return file

    def _open_core(self, client: Client, flags: int) -> _CoreFile:
        """Write an ELF core of the guest to a temporary file, and return the core as an open file.

        Raises: KernelError EACCES (the client is neither root nor the mount's owner, or opens for writing),
        EBUSY (MAX_OPEN cores are open), ENOSPC (no directory has space).
        """
        if flags & os.O_ACCMODE != os.O_RDONLY or not self.guest.owner.is_privileged(client):
            raise KernelError(errno.EACCES, VMCORE)
        if self.open_cores >= MAX_OPEN:
            raise KernelError(errno.EBUSY, f"vmcore: {MAX_OPEN} are open; close one first")
        with self.guest.lock.observing():
            core = write_core(self._core, self._core.vmcoreinfo())
        self.open_cores += 1
        return _CoreFile(self, VMCORE, flags, core)


def native_mount(
    tasks: LinuxTasks,
    watch: ProcessWatch,
    owner: Owner,
    modules: ModuleFiles | None = None,
    *,
    is_tracefs: bool,
    is_clock_real: bool = False,
    lock: ControlLock | None = None,
) -> Mount:
    """Return a mount that shows a kernel's own files and, if `is_tracefs` is False, machine/.

    `modules`: module files of this kernel; None: clients cannot load modules. `lock`: the control lock; None:
    create one.
    `is_tracefs`: tracefs is the root of the mount, which shows nothing else; if False, tracefs is at
    tracing/.
    `is_clock_real`: the real time between requests passes in the guest, too; if False, each request advances
    the guest's time by a tick.
    """
    tasks.deliver_breakpoints()
    time = RealTime(tasks) if is_clock_real else PassingTime(tasks)
    guest = LinuxGuest(tasks, watch, owner, modules, lock=lock, begins=time.request_begins)
    if is_tracefs:
        return Mount({"/": GuestFs(guest, {"/": TRACEFS})}, limits=Limits())
    paths = {
        "/": DEBUGFS,
        **{f"/{top}": at for top, at in TOPS.items()},
        **{path: TRACEFS + path for path in LINKED},
        **FORWARDED,
    }
    files = GuestFs(guest, paths)
    table: dict[str, FileSystem] = dict.fromkeys(paths, files)
    limits = Limits()
    table[MACHINE] = MachineFs(guest, limits, lambda: mount.past)
    table[MODULES] = ModulesFs(guest, paths)
    mount = Mount(table, limits=limits, lasting=LASTING)
    return mount
