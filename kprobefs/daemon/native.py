"""A distribution's kernel as what is mounted: booted while somebody watches, answering by its own kprobes."""

from __future__ import annotations

import os

from emulated_kernel.guests.common.host_processes import HostProcesses
from emulated_kernel.guests.linux.boot_cache import ensure_cached, started
from emulated_kernel.guests.linux.mounts.native_mount import NativeMount
from emulated_kernel.image.linux.module_files import ModuleFiles
from emulated_kernel.image.linux.open_image import kernel_file
from emulated_kernel.vfs.core.node import Owner
from kprobefs.common.errors import explained
from kprobefs.common.progress import Progress
from kprobefs.mount_options import MountOptions


def prepare(options: MountOptions) -> None:
    """Have the kernel booted, for whoever watches; the mount starts from that. Raises: CliError."""
    image = str(options.machine.image)
    seed = options.machine.seed
    bar: Progress | None = None
    shown = 0

    def progress(done: int, total: int) -> None:
        nonlocal bar, shown
        bar = bar or Progress("booting", total)
        bar.add(done - shown)
        shown = done

    with explained(image):
        ensure_cached(image, seed, progress)
    if bar is not None:
        bar.end()


def native_mount(options: MountOptions) -> NativeMount:
    """The mount of a kernel that has booted. Raises: CliError."""
    image = str(options.machine.image)
    with explained(image):
        tasks = started(image, options.machine.seed)
        modules = ModuleFiles(kernel_file(image), tasks.release)
    owner = Owner(os.geteuid(), os.getegid())
    return NativeMount(tasks, HostProcesses(), owner, modules, is_tracefs=options.layout == "tracefs")
