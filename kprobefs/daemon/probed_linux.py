"""A distribution's kernel as what is mounted: our engine probes its text."""

from __future__ import annotations

import os

from emulated_kernel.guests.common.host_processes import HostProcesses
from emulated_kernel.guests.linux.boot_cache import started_with_kernel
from emulated_kernel.guests.linux.mounts.probed_mount import ProbedMount
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.image.linux.module_files import ModuleFiles
from emulated_kernel.image.linux.open_image import kernel_file
from emulated_kernel.kprobes.profile import profile_named
from emulated_kernel.vfs.core.node import Owner
from kprobefs.common.errors import explained
from kprobefs.mount_options import MountOptions


def engine_mount(options: MountOptions) -> ProbedMount:
    """The mount of a kernel that has booted, which our engine probes. Raises: CliError."""
    image = str(options.machine.image)
    with explained(image):
        tasks, kernel = started_with_kernel(image, options.machine.seed)
        engine = LinuxEngine(tasks, kernel, profile_named(options.machine.profile))
        modules = ModuleFiles(kernel_file(image), tasks.release)
    owner = Owner(os.geteuid(), os.getegid())
    served = ProbedMount(engine, HostProcesses(), owner, modules, is_tracefs=options.layout == "tracefs")
    # Most of what it takes to begin is never read again.
    kernel.release_pages()
    return served
