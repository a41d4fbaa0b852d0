"""Functions that return the objects behind a mount of a distribution's kernel."""

from __future__ import annotations

from emulated_kernel.guests.linux.mounts.control_calls import LinuxControlCalls
from emulated_kernel.guests.linux.mounts.guest_fs import GuestFile, GuestFs
from emulated_kernel.guests.linux.mounts.linux_guest import LinuxGuest
from emulated_kernel.guests.linux.vmcore.vmcore_fs import FILES, VmcoreFs
from emulated_kernel.guests.linux.vmcore.vmcore_mount import VmcoreControlCalls
from emulated_kernel.vfs.control_fs import ControlFs
from emulated_kernel.vfs.mount import Mount


def control(mount: Mount) -> ControlFs:
    """Return the ControlFs of a mount: the file system of its control files."""
    root = mount.filesystem_at("/")
    assert isinstance(root, ControlFs)
    return root


def guest_of(mount: Mount) -> LinuxGuest:
    """Return the guest that the mount's file systems share."""
    root = mount.filesystem_at("/")
    return root.guest if isinstance(root, GuestFs) else calls_of(mount).guest


def calls_of(mount: Mount) -> LinuxControlCalls:
    """Return the object that repeats the clients' calls on control files in the guest."""
    found = control(mount).calls
    assert isinstance(found, LinuxControlCalls)
    return found


def file(mount: Mount, handle: int) -> GuestFile:
    """Return the guest's open file that belongs to the handle `handle`."""
    found = mount._handles[handle]
    assert isinstance(found, GuestFile)
    return found


def core(mount: Mount) -> VmcoreControlCalls:
    """Return the VmcoreControlCalls of a mount of a dump, which calls functions of the dumped kernel."""
    found = control(mount).calls
    assert isinstance(found, VmcoreControlCalls)
    return found


def core_files(mount: Mount) -> VmcoreFs:
    """Return the VmcoreFs of a mount: the file system with the files of the dumped kernel."""
    found = mount.filesystem_at(FILES)
    assert isinstance(found, VmcoreFs)
    return found
