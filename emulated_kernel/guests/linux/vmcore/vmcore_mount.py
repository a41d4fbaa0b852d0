"""vmcore_mount: a mount of a vmcore's kernel, to probe it, call its functions, and read its files."""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from threading import get_ident

from emulated_kernel.guests.linux.mounts.probed_tree import engine_tree
from emulated_kernel.guests.linux.probing.probe_engine import KernelEngine
from emulated_kernel.guests.linux.vmcore.vmcore_calls import BUFFER_SIZE, VmcoreCalls
from emulated_kernel.guests.linux.vmcore.vmcore_files import VmcoreFiles
from emulated_kernel.guests.linux.vmcore.vmcore_fs import FILES, VmcoreFs
from emulated_kernel.guests.linux.vmcore.vmcore_guest import VmcoreGuest
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.control_fs import ControlFs, GuestCalls
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.command_file import GuestSteppedFile
from emulated_kernel.vfs.core.node import Directory, Owner
from emulated_kernel.vfs.core.seq_file import single
from emulated_kernel.vfs.filesystem import FileSystem
from emulated_kernel.vfs.mount import Mount
from emulated_kernel.vfs.trees.call_file import Calls
from emulated_kernel.vfs.trees.stats import HistoryFile

_ITERATOR = struct.Struct("<QQQ")
"""Layout of the start of log()'s buffer: struct kmsg_dump_iter (v6.1), then the length of the copied text."""


class VmcoreControlCalls(GuestCalls):
    """GuestCalls for a mounted vmcore, in which no task runs.

    No system call of a client is repeated in the guest, which runs only the kernel's functions that control
    files call.
    """

    sees_lookups = False

    def __init__(self, guest: VmcoreGuest, engine: KernelEngine) -> None:
        self.guest = guest
        self.engine = engine
        engine.machine.clock.pass_to(guest.time)
        stack = engine.components.tracing.system.stack
        self.calls = VmcoreCalls(guest, engine.machine, engine.kernel, stack.callers, engine.drop_calls)
        self._is_closed = False

    def request(self, client: Client | None) -> AbstractContextManager[None]:
        """Return the context in which the guest runs for a request. Lock: taken.

        If the process of `client` is killed, the run ends. If `client` is None, only the time limit of
        VmcoreCalls.bounded() ends it.

        Raises: KernelError EIO (the mount has ended).
        """
        return self._running(client, self.engine.request_begins)

    def look_up(self, client: Client | None) -> AbstractContextManager[None]:
        """Return the context in which the guest runs for a lookup.

        It is the context of request(), except that observers of the guest are not told of a request. So they
        do no delayed work.
        """
        return self._running(client, self.engine.call_begins)

    @contextmanager
    def _running(self, client: Client | None, begins: Callable[[], None]) -> Iterator[None]:
        with self.engine.lock:
            if self._is_closed:
                raise KernelError(errno.EIO, "the mount has ended")
            begins()
            try:
                is_dying = partial(self.engine.lock.is_dying, get_ident())
                wanted = self.guest.machine.wanted_until(is_dying) if client else nullcontext()
                with wanted, self.calls.bounded():
                    yield
            finally:
                for notify in self.guest.events.call_ended:
                    notify()

    @property
    def is_dead(self) -> bool:
        """Whether the guest can't run any more; see GuestCalls."""
        return bool(self.guest.machine.death)

    def log(self) -> bytes:
        """Return the newest messages of the kernel log, as many as fit into `calls.buffer`."""
        memory = self.engine.machine.memory
        buffer = self.calls.buffer
        call = self.calls.call_function
        text = buffer + _ITERATOR.size
        size = BUFFER_SIZE - _ITERATOR.size
        memory.write(buffer, bytes(_ITERATOR.size))
        call("kmsg_dump_rewind", buffer)
        call("kmsg_dump_get_buffer", buffer, 1, text, size, buffer + 16)
        *_, length = _ITERATOR.unpack(memory.read(buffer, _ITERATOR.size))
        return memory.read(text, min(length, size))

    def close(self) -> None:
        """Release the guest's resources, because the mount ends; see GuestCalls."""
        if not self._is_closed:
            self._is_closed = True
            self.calls.close()
            self.guest.machine.close()


def vmcore_mount(guest: VmcoreGuest, engine: KernelEngine, owner: Owner, *, is_tracefs: bool) -> Mount:
    """Return a mount of a dump's kernel.

    The kernel runs nothing but the functions that clients call. The file of the dump stays unchanged.
    `owner`: owner of the files. `is_tracefs`: whether tracefs is the root, and listings show nothing else.
    Otherwise the root has all control files and the kernel's files.

    No directory is in FileSystem.clients_own, because a function that a client calls may create or remove any
    file.
    """
    strategy = VmcoreControlCalls(guest, engine)
    files = VmcoreFiles(strategy.calls, engine.kernel, engine.machine.memory)
    calls = Calls(strategy.calls.call_function, engine.machine.memory.word_size)
    tree = engine_tree(
        engine,
        owner,
        strategy.log,
        {
            "call": GuestSteppedFile(0o600, single(lambda: calls.result), calls.execute),
            "history": HistoryFile(engine.components),
        },
        {FILES[1:]: Directory(0o555, {})},
        is_tracefs=is_tracefs,
    )
    table: dict[str, FileSystem] = {"/": ControlFs(tree, engine.lock, strategy)}
    if not is_tracefs:
        table[FILES] = VmcoreFs(files, strategy.request, strategy.look_up, owner, engine.lock)
    return Mount(table, limits=engine.limits, lasting=() if is_tracefs else ("kprobes", "machine", "tracing"))
