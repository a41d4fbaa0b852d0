"""A distribution's kernel as what is mounted: its own kprobes answer, or ours over its text."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from emulated_kernel.errors import KernelError
from emulated_kernel.host.mirror.processes import HostProcesses
from emulated_kernel.image.linux.module_files import ModuleFiles
from emulated_kernel.kprobes.profile import profile_named
from emulated_kernel.linux.core_guest import ensure_core_cached, started_core
from emulated_kernel.linux.core_mount import CoreMount
from emulated_kernel.linux.engine import KernelEngine, LinuxEngine
from emulated_kernel.linux.engine_mount import EngineMount
from emulated_kernel.linux.linux_mount import LinuxMount
from emulated_kernel.linux.start import ensure_cached, file_of, started, started_with_kernel
from emulated_kernel.machine.traps.trap import HardwareError, MemoryFault
from emulated_kernel.vfs.core.node import Owner
from kprobefs.failure import Exit, Failure
from kprobefs.options import MountOptions
from kprobefs.progress import Progress


def prepare(options: MountOptions) -> None:
    """Have the kernel booted, for whoever watches; the mount starts from that. Raises: Failure."""
    if options.core is not None:
        with _explained(options.core):
            ensure_core_cached(options.core)
        return
    image, seed = str(options.machine.image), options.machine.seed
    bar: Progress | None = None
    shown = 0

    def progress(done: int, total: int) -> None:
        nonlocal bar, shown
        bar = bar or Progress("booting", total)
        bar.add(done - shown)
        shown = done

    with _explained(image):
        ensure_cached(image, seed, progress)
    if bar is not None:
        bar.end()


def core_mount(options: MountOptions, core: str) -> CoreMount:
    """The mount of a dump's kernel. Raises: Failure."""
    owner = Owner(os.geteuid(), os.getegid())
    try:
        with _explained(core):
            guest, kernel = started_core(core)
            engine = KernelEngine(guest, kernel, profile_named(options.machine.profile))
            return CoreMount(guest, engine, owner, is_tracefs=options.layout == "tracefs")
    except (MemoryFault, HardwareError, LookupError, struct.error) as error:
        message = f"{core}: not a usable dump: its kernel's structures lead nowhere: {error}"
        raise Failure(message, Exit.USAGE) from error


def native_mount(options: MountOptions) -> LinuxMount:
    """The mount of a kernel that has booted. Raises: Failure."""
    image = str(options.machine.image)
    with _explained(image):
        tasks = started(image, options.machine.seed)
        modules = ModuleFiles(file_of(image), tasks.release)
    owner = Owner(os.geteuid(), os.getegid())
    return LinuxMount(tasks, HostProcesses(), owner, modules, is_tracefs=options.layout == "tracefs")


def engine_mount(options: MountOptions) -> EngineMount:
    """The mount of a kernel that has booted, which our engine probes. Raises: Failure."""
    image = str(options.machine.image)
    with _explained(image):
        tasks, kernel = started_with_kernel(image, options.machine.seed)
        engine = LinuxEngine(tasks, kernel, profile_named(options.machine.profile))
        modules = ModuleFiles(file_of(image), tasks.release)
    owner = Owner(os.geteuid(), os.getegid())
    served = EngineMount(engine, HostProcesses(), owner, modules, is_tracefs=options.layout == "tracefs")
    # Most of what it takes to begin is never read again.
    kernel.release_pages()
    return served


@contextmanager
def _explained(image: str) -> Iterator[None]:
    try:
        yield
    except KernelError as error:
        raise Failure(f"{image}: {error.strerror}", Exit.USAGE) from error
    except OSError as error:
        raise Failure(f"{error.filename or image}: {error.strerror or error}", Exit.USAGE) from error
