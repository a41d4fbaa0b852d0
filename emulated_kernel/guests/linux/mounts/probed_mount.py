"""ProbedMount: a distribution's kernel probed by our engine: our control files, and scratch/ of the guest."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial

from emulated_kernel.components.guest_directories import MAKES, GuestDirectories
from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.guest.tasks import LinuxTask
from emulated_kernel.guests.linux.initramfs import DEVICES, PROC, TMPFS
from emulated_kernel.guests.linux.mounts.control_calls import ControlCalls
from emulated_kernel.guests.linux.mounts.control_files import FIRST_HANDLE, ControlFiles
from emulated_kernel.guests.linux.mounts.guest_paths import PATHS
from emulated_kernel.guests.linux.mounts.native_mount import NativeMount
from emulated_kernel.guests.linux.mounts.probed_tree import engine_tree
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.image.linux.module_files import ModuleFiles
from emulated_kernel.machine.traps.trap import GuestFault
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import INO_SPACES, Client, DirEntry, Stat
from emulated_kernel.vfs.core.node import Directory, Owner
from emulated_kernel.vfs.core.seq_file import GuestCommandFile, HostReadingFile, Records, single
from emulated_kernel.vfs.trees.call_file import Calls

_ADDRESS = re.compile("0x[0-9a-f]{16}")
_PROBING = frozenset({
    "register_kprobe", "register_kprobes", "register_kretprobe", "register_kretprobes",
    "__kprobe_event_gen_cmd_start", "register_fprobe", "register_fprobe_ips", "register_fprobe_syms",
    "register_ftrace_function", "register_ftrace_function_nolock", "register_ftrace_graph",
    "register_ftrace_direct", "register_ftrace_direct_multi", "modify_ftrace_direct",
    "modify_ftrace_direct_multi", "modify_ftrace_direct_multi_nolock", "klp_enable_patch",
})  # fmt: skip
"""What modules call that patch text of the kernel where ours are."""
_GUESTS = {TMPFS: 0o1777, DEVICES: 0o755}
"""Directories of the root that are the guest's, where they are in the guest, with their modes."""


class ProbedMount(NativeMount):
    """A request for a file of ours is answered by the host while the client's task is the current one.

    Where somebody could see it, it is a system call of that task's. All raise KernelError with Linux's errno.
    """

    def __init__(
        self,
        engine: LinuxEngine,
        watch: ProcessWatch,
        owner: Owner,
        modules: ModuleFiles | None = None,
        *,
        is_tracefs: bool,
        keeps_tracefs: bool = False,
    ) -> None:
        """`modules`: this kernel's own. `is_tracefs`: tracefs is the mount's root, and all that there is.

        `keeps_tracefs`: the guest's own stays where it is for others, and nobody sees calls on files of ours.
        """
        super().__init__(engine.tasks, watch, owner, modules, is_tracefs=is_tracefs, lock=engine.lock)
        self._engine = engine
        self._request_begun = engine.request_begins
        self._call_ended = engine.guest.events.call_ended
        # What directories of the guest's are mounted on.
        further = {top[1:]: Directory(mode, {}) for top, mode in _GUESTS.items()}
        calls = Calls(self._call_function, engine.machine.memory.word_size)
        machine = {
            "call": GuestCommandFile(0o600, single(lambda: calls.result), calls.execute),
            "modules": HostReadingFile(
                0o644, self._module_lines, partial(self._prepared_modules, refused=_PROBING)
            ),
        }
        files = engine_tree(engine, owner, self._log_text, machine, further, is_tracefs=is_tracefs)
        self._calls = ControlCalls(
            engine.tasks,
            engine.machine,
            engine.kernel,
            files,
            is_tracefs=is_tracefs,
            is_refused=keeps_tracefs,
        )
        self._files = ControlFiles(files, self.lock, self._control, self._calls)
        self._is_guests: Callable[[str], bool] = lru_cache(PATHS)(self._leads_to_guest)
        engine.machine.text.before_first_change.append(self._files.open_in_guest)
        if not keeps_tracefs:
            GuestDirectories(
                engine.components.tracing.system.events,
                self._call_function,
                self._sees_directories,
                lambda: self._tasks.machine.is_running,
            )

    def _call_function(self, function: str, *arguments: int | str) -> int:
        with self._running:
            return self._engine.kernel_calls.call_function(function, *arguments)

    def _sees_directories(self) -> bool:
        """Whether somebody probes what makes them: a thread for each would take longer than its event."""
        if not self._calls.is_watched:
            return False
        ledger = self._engine.machine.text.ledger
        symbols = self._engine.kernel.kallsyms.by_name(MAKES)
        return any(
            not ledger.keys().isdisjoint(range(each.address, each.address + each.size)) for each in symbols
        )

    def _module_lines(self, client: Client) -> Records:
        """/proc/modules; addresses are 0 for who may not know them."""

        def shown() -> str:
            with self._running:
                text = self._syscalls.read_all(f"{PROC}/modules").decode()
            return text if self._owner.is_privileged(client) else _ADDRESS.sub("0x0000000000000000", text)

        return single(shown)

    # Whose a file is

    def _leads_to_guest(self, path: str) -> bool:
        return not self._is_tracefs and f"/{path[1:].partition('/')[0]}" in _GUESTS

    def request_begins(self, client: Client, opens: bool) -> LinuxTask:
        self._request_begun()
        if self._calls.released:
            self._calls.close_released()
        return NativeMount.request_begins(self, client, opens)

    def request_ends(self, *, has_failed: bool) -> None:
        try:
            NativeMount.request_ends(self, has_failed=has_failed)
        finally:
            for tell in self._call_ended:
                tell()

    @contextmanager
    def _control(self, client: Client) -> Iterator[LinuxTask | None]:
        """Around what a client does with a file of ours; that answers, whatever becomes of the guest."""
        with self.lock:
            self.check_open()
            # It may let the guest run: whoever is the current task afterwards.
            self._request_begun()
            task = None
            try:
                if not self._tasks.machine.death:
                    with suppress(KernelError, GuestFault):
                        if self._calls.is_watched:
                            self._close_released()
                        self._calls.close_released()
                        task = self._clients.task_of(client)
                        self._tasks.schedule_in(task)
                yield task
            finally:
                for tell in self._call_ended:
                    tell()
                self._see_free_pages()

    # Attributes and names

    def getattr(self, path: str, client: Callable[[], Client] | None = None) -> Stat:
        if self._is_guests(path):
            return NativeMount.getattr(self, path, client)
        return self._files.getattr(path)

    def _shown_ino(self, ino: int) -> int:
        """Numbers of the guest's files are none of ours."""
        return ino * INO_SPACES + 1

    def fgetattr(self, handle: int, client: Callable[[], Client] | None = None) -> Stat:
        if handle < FIRST_HANDLE:
            return super().fgetattr(handle, client)
        return self._files.fgetattr(handle)

    def opendir(self, client: Client, path: str) -> int:
        if self._is_guests(path):
            return super().opendir(client, path)
        return self._files.opendir(client, path)

    def getdents(self, client: Client, handle: int, start: int) -> list[DirEntry]:
        if handle < FIRST_HANDLE:
            return super().getdents(client, handle, start)
        return self._files.listed(handle, start, self.readdir)

    def readdir(self, path: str) -> list[DirEntry]:
        if self._is_guests(path):
            above = self._files.getattr("/").ino if path in _GUESTS else 0
            return [
                entry._replace(ino=above if above and entry.name == ".." else entry.ino * INO_SPACES + 1)
                for entry in super().readdir(path)
            ]
        entries = self._files.readdir(path)
        if path == "/" and not self._is_tracefs:
            # A dead guest keeps nobody from listing.
            with suppress(KernelError):
                mounted = {top[1:]: self.getattr(top).ino for top in _GUESTS}
                return [entry._replace(ino=mounted.get(entry.name, entry.ino)) for entry in entries]
        return entries

    def readlink(self, client: Client, path: str) -> str:
        return super().readlink(client, path) if self._is_guests(path) else self._files.readlink(client, path)

    # Open files

    def open(self, client: Client, path: str, flags: int) -> int:
        if self._is_guests(path):
            return NativeMount.open(self, client, path, flags)
        return self._files.open(client, path, flags)

    def create(self, client: Client, path: str, mode: int, flags: int) -> int:
        if self._is_guests(path):
            return super().create(client, path, mode, flags)
        return self._files.create(client, path, mode, flags)

    def is_stream(self, handle: int) -> bool:
        return NativeMount.is_stream(self, handle) if handle < FIRST_HANDLE else self._files.is_stream(handle)

    def set_status_flags(self, handle: int, flags: int) -> None:
        if handle < FIRST_HANDLE:
            super().set_status_flags(handle, flags)
        else:
            self._files.set_status_flags(handle, flags)

    def reads_host(self, handle: int) -> bool:
        return super().reads_host(handle) if handle < FIRST_HANDLE else self._files.reads_host(handle)

    def read(self, client: Client, handle: int, size: int, offset: int) -> bytes:
        if handle < FIRST_HANDLE:
            return NativeMount.read(self, client, handle, size, offset)
        return self._files.read(client, handle, size, offset)

    def read_page(self, client: Client, handle: int, size: int, offset: int) -> bytes:
        if handle < FIRST_HANDLE:
            return super().read_page(client, handle, size, offset)
        return self._files.read_page(client, handle, size, offset)

    def write(self, client: Client, handle: int, data: bytes, offset: int) -> int:
        if handle < FIRST_HANDLE:
            return super().write(client, handle, data, offset)
        return self._files.write(client, handle, data, offset)

    def wait(self, handle: int, timeout: float) -> None:
        if handle < FIRST_HANDLE:
            super().wait(handle, timeout)
        else:
            self._files.wait(handle, timeout)

    def give_up(self, client: Client, handle: int, error: int) -> None:
        if handle < FIRST_HANDLE:
            super().give_up(client, handle, error)
        else:
            self._files.give_up(client, handle, error)

    def poll(self, handle: int, notify: Callable[[], None] | None) -> int:
        if handle < FIRST_HANDLE:
            return super().poll(handle, notify)
        return self._files.poll(handle, notify)

    def release(self, handle: int) -> None:
        if handle < FIRST_HANDLE:
            NativeMount.release(self, handle)
        else:
            self._files.release(handle)

    # Changes of the tree

    def ftruncate(self, client: Client, handle: int, size: int) -> None:
        if handle < FIRST_HANDLE:
            super().ftruncate(client, handle, size)
        else:
            self._files.ftruncate(client, handle, size)

    def truncate(self, client: Client, path: str, size: int) -> None:
        if self._is_guests(path):
            super().truncate(client, path, size)
        else:
            self._files.truncate(client, path, size)

    def mkdir(self, client: Client, path: str, mode: int) -> None:
        if self._is_guests(path):
            super().mkdir(client, path, mode)
        else:
            self._files.mkdir(client, path, mode)

    def rmdir(self, client: Client, path: str) -> None:
        if self._is_guests(path):
            super().rmdir(client, path)
        else:
            self._files.rmdir(client, path)

    def unlink(self, client: Client, path: str) -> None:
        if self._is_guests(path):
            super().unlink(client, path)
        else:
            self._files.unlink(client, path)

    def rename(self, client: Client, old: str, new: str) -> None:
        if self._is_guests(old) != self._is_guests(new):
            raise KernelError(errno.EXDEV, "one of the names is the guest's")
        if self._is_guests(old):
            super().rename(client, old, new)
        else:
            self._files.rename(client, old, new)

    def link(self, client: Client, old: str, new: str) -> None:
        if self._is_guests(old) != self._is_guests(new):
            raise KernelError(errno.EXDEV, "one of the names is the guest's")
        if self._is_guests(old):
            super().link(client, old, new)
        else:
            self._files.link(client, old, new)

    def mknod(self, client: Client, path: str, mode: int) -> None:
        if self._is_guests(path):
            super().mknod(client, path, mode)
        else:
            self._files.mknod(client, path, mode)

    def fsync(self, client: Client, handle: int) -> None:
        if handle < FIRST_HANDLE:
            super().fsync(client, handle)
        else:
            self._files.fsync(client, handle)

    def symlink(self, client: Client, path: str, target: str) -> None:
        if self._is_guests(path):
            super().symlink(client, path, target)
        else:
            self._files.symlink(client, path, target)

    def chmod(self, client: Client, path: str, mode: int) -> None:
        if self._is_guests(path):
            super().chmod(client, path, mode)
        else:
            self._files.chmod(client, path, mode)

    def chown(self, client: Client, path: str, uid: int, gid: int) -> None:
        if self._is_guests(path):
            super().chown(client, path, uid, gid)
        else:
            self._files.chown(client, path, uid, gid)

    def utimens(self, client: Client, path: str, atime_ns: int | None, mtime_ns: int | None) -> None:
        if self._is_guests(path):
            super().utimens(client, path, atime_ns, mtime_ns)
        else:
            self._files.utimens(client, path, atime_ns, mtime_ns)
