"""A dump of a running kernel as what is mounted."""

from __future__ import annotations

import os
import struct

from emulated_kernel.guests.linux.probing.probe_engine import KernelEngine
from emulated_kernel.guests.linux.vmcore.vmcore_guest import ensure_core_cached, started_core
from emulated_kernel.guests.linux.vmcore.vmcore_mount import VmcoreMount
from emulated_kernel.kprobes.profile import profile_named
from emulated_kernel.machine.traps.trap import HardwareError, MemoryFault
from emulated_kernel.vfs.core.node import Owner
from kprobefs.common.errors import CliError, ExitStatus, explained
from kprobefs.mount_options import MountOptions


def prepare(vmcore: str) -> None:
    """Have the dump converted; the mount starts from that. Raises: CliError."""
    with explained(vmcore):
        ensure_core_cached(vmcore)


def core_mount(options: MountOptions, vmcore: str) -> VmcoreMount:
    """The mount of a dump's kernel. Raises: CliError."""
    owner = Owner(os.geteuid(), os.getegid())
    try:
        with explained(vmcore):
            guest, kernel = started_core(vmcore)
            engine = KernelEngine(guest, kernel, profile_named(options.machine.profile))
            return VmcoreMount(guest, engine, owner, is_tracefs=options.layout == "tracefs")
    except (MemoryFault, HardwareError, LookupError, struct.error) as error:
        message = f"{vmcore}: not a usable dump: its kernel's structures lead nowhere: {error}"
        raise CliError(message, ExitStatus.USAGE) from error
