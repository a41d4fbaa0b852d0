"""Mounts: all mounts of one kernel of kprobefs's own.

Before a probe can notice more kinds of system calls, the files that clients have open are opened in the
guest, too.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from emulated_kernel.guests.builtin.guest import Guest
from emulated_kernel.guests.builtin.mounts.builtin_calls import BuiltinCalls
from emulated_kernel.guests.builtin.mounts.client_calls import ClientCalls
from emulated_kernel.guests.builtin.mounts.scratch_fs import ScratchFs
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.limits import Limits
from emulated_kernel.vfs.control_fs import ControlFs
from emulated_kernel.vfs.core.node_tree import NodeTree
from emulated_kernel.vfs.filesystem import FileSystem
from emulated_kernel.vfs.mount import Mount

GUESTS_OWN = ("/scratch", "/dev")
"""Directories of the mount whose files live in the guest's own file systems."""
LASTING = ("kprobes", "machine", "scratch", "tracing")
"""Directories in the mount's root that exist as long as the mount, whichever kernel it shows."""


def mount_table(files: NodeTree, guest: Guest, lock: ControlLock) -> dict[str, FileSystem]:
    """Return a map: directory of a mount -> file system that the mount shows there.

    `files` is shown at "/". A directory of GUESTS_OWN is added only if `files` has a directory of that name.
    """
    clients = ClientCalls(guest, lock)
    names = files.root.names()
    table: dict[str, FileSystem] = {"/": ControlFs(files, lock, BuiltinCalls(guest, clients))}
    for number, top in enumerate(GUESTS_OWN, start=1):
        # If tracefs is the root, `files` has none of these directories.
        if top[1:] in names:
            table[top] = ScratchFs(guest, clients, top, number, lock)
    return table


class Mounts:
    """All mounts of one kernel. The methods need the control lock."""

    def __init__(self, guest: Guest, lock: ControlLock, limits: Limits) -> None:
        self._guest = guest
        self._lock = lock
        self._limits = limits
        self._mounts: WeakKeyDictionary[Mount, None] = WeakKeyDictionary()
        """Mounts that are still referenced, oldest first; a weak set."""
        guest.watched.before_more.append(self._open_in_guest)

    def add(self, files: NodeTree) -> Mount:
        """Create a mount that shows `files` and return it."""
        self._lock.assert_held()
        table = mount_table(files, self._guest, self._lock)
        # Invariant: no file system here has clients_own: each lookup of a client must reach the guest.
        mount = Mount(table, limits=self._limits, lasting=LASTING)
        self._mounts[mount] = None
        return mount

    def adopt_mount(self, mount: Mount, files: NodeTree) -> None:
        """Take over a mount of the previous kernel, and make it show `files`, the tree of this kernel."""
        self._lock.assert_held()
        mount.replace(mount_table(files, self._guest, self._lock))
        self._mounts[mount] = None

    def _open_in_guest(self, names_end: bool) -> None:
        """Open in the guest all files of all mounts that clients, but not the guest, have open.

        This precedes a change after which a probe can notice more calls. `names_end`: see
        FileSystem.open_in_guest.
        """
        for mount in self._mounts:
            mount.open_in_guest(names_end=names_end)
