"""vmcore_mount: the kernel in a vmcore as a mount: probes, calls of its functions, and its files to read."""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from emulated_kernel.guests.linux.mounts.probed_tree import engine_tree
from emulated_kernel.guests.linux.probing.probe_engine import KernelEngine
from emulated_kernel.guests.linux.vmcore.vmcore_calls import BUFFER_SIZE, VmcoreCalls
from emulated_kernel.guests.linux.vmcore.vmcore_files import VmcoreFiles
from emulated_kernel.guests.linux.vmcore.vmcore_fs import FILES, VmcoreFs
from emulated_kernel.guests.linux.vmcore.vmcore_guest import VmcoreGuest
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.control_fs import ControlFs, GuestCalls
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Directory, Owner
from emulated_kernel.vfs.core.seq_file import GuestCommandFile, single
from emulated_kernel.vfs.filesystem import FileSystem
from emulated_kernel.vfs.mount import Mount
from emulated_kernel.vfs.trees.call_file import Calls

_ITERATOR = struct.Struct("<QQQ")
"""struct kmsg_dump_iter (v6.1), and after it the length of what was taken."""


class VmcoreControlCalls(GuestCalls):
    """A dump has no tasks that could make calls; what a control file does may run its functions, though."""

    sees_lookups = False

    def __init__(self, guest: VmcoreGuest, engine: KernelEngine) -> None:
        self.guest = guest
        self.engine = engine
        engine.machine.clock.pass_to(guest.time)
        stack = engine.components.tracing.system.stack
        self.calls = VmcoreCalls(guest, engine.machine, engine.kernel, stack.callers, engine.drop_calls)
        self._is_closed = False

    @contextmanager
    def request(self, client: Client | None) -> Iterator[None]:
        """Return what runs the guest, for a client if one waits for it; if that dies, the run ends.

        Lock: takes.
        """
        with self.engine.lock:
            if self._is_closed:
                raise KernelError(errno.EIO, "the mount has ended")
            self.engine.request_begins()
            try:
                wanted = self.guest.machine.wanted_by(client.pid) if client else nullcontext()
                with wanted, self.calls.bounded():
                    yield
            finally:
                for tell in self.guest.events.call_ended:
                    tell()

    @property
    def is_dead(self) -> bool:
        """See GuestCalls."""
        return bool(self.guest.machine.death)

    def log(self) -> bytes:
        """Return what fits into the buffer of the end of the kernel's log."""
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
        """See GuestCalls."""
        if not self._is_closed:
            self._is_closed = True
            self.calls.close()
            self.guest.machine.close()


def vmcore_mount(guest: VmcoreGuest, engine: KernelEngine, owner: Owner, *, is_tracefs: bool) -> Mount:
    """Return a mount in which nothing runs but what is called; nothing of the dump's file is changed.

    `is_tracefs`: tracefs is the root, and all that is listed. Unlike a Linux guest's mount it has no
    `clients_own`: what is called may remove files, too.
    """
    strategy = VmcoreControlCalls(guest, engine)
    files = VmcoreFiles(strategy.calls, engine.kernel, engine.machine.memory)
    calls = Calls(strategy.calls.call_function, engine.machine.memory.word_size)
    tree = engine_tree(
        engine,
        owner,
        strategy.log,
        {"call": GuestCommandFile(0o600, single(lambda: calls.result), calls.execute)},
        {FILES[1:]: Directory(0o555, {})},
        is_tracefs=is_tracefs,
    )
    table: dict[str, FileSystem] = {"/": ControlFs(tree, engine.lock, strategy)}
    if not is_tracefs:
        table[FILES] = VmcoreFs(files, strategy.request, owner, engine.lock)
    return Mount(table, lasting=() if is_tracefs else ("kprobes", "machine", "tracing"))
