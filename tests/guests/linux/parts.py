"""What a mount of a distribution's kernel is made of."""

from __future__ import annotations

from emulated_kernel.guests.linux.vmcore.vmcore_fs import FILES, VmcoreFs
from emulated_kernel.guests.linux.vmcore.vmcore_mount import VmcoreControlCalls
from emulated_kernel.vfs.control_fs import ControlFs
from emulated_kernel.vfs.mount import Mount


def control(mount: Mount) -> ControlFs:
    """Its control files."""
    root = mount.filesystem_at("/")
    assert isinstance(root, ControlFs)
    return root


def core(mount: Mount) -> VmcoreControlCalls:
    """What runs a dump's functions."""
    calls = control(mount).calls
    assert isinstance(calls, VmcoreControlCalls)
    return calls


def core_files(mount: Mount) -> VmcoreFs:
    """A dump's files."""
    found = mount.filesystem_at(FILES)
    assert isinstance(found, VmcoreFs)
    return found
