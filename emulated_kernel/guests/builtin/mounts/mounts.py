"""Mounts: the mounts of one kernel, whose open files the guest has too once its text differs."""

from __future__ import annotations

from emulated_kernel.guests.builtin.guest import Guest
from emulated_kernel.guests.builtin.mounts.guest_mount import GuestMount
from emulated_kernel.machine.text.text import Text
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.limits import Limits
from emulated_kernel.vfs.core.node_tree import NodeTree


class Mounts:
    """All of them; needs the control lock."""

    def __init__(self, text: Text, guest: Guest, lock: ControlLock, limits: Limits) -> None:
        self._guest = guest
        self._lock = lock
        self._limits = limits
        self._mounts: list[GuestMount] = []
        text.before_first_change.append(self._open_in_guest)

    def add(self, files: NodeTree) -> GuestMount:
        """A new one that shows `files`."""
        self._lock.assert_held()
        mount = GuestMount(files, self._guest, self._lock, self._limits)
        self._mounts.append(mount)
        return mount

    def adopt_mount(self, mount: GuestMount, files: NodeTree) -> None:
        """A mount of the kernel that this one succeeds shows `files`, of this kernel, from now on."""
        self._lock.assert_held()
        mount.serve(files, self._guest)
        self._mounts.append(mount)

    def _open_in_guest(self) -> None:
        """Text is about to change: what the mounts have open is opened in the guest too."""
        for mount in self._mounts:
            mount.open_in_guest()
