"""Backends of a mount: kprobefs's own kernel, a distribution's kernel, and a kernel in a vmcore.

A distribution's kernel is probed by kprobefs's own engine or by the kernel's own kprobes. Each function
imports its modules when it is called. Importing the modules of all backends would take a third of the time
of a start.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.garbage_collection import garbage_collection_stopped
from kprobefs.common.errors import CliError, ExitStatus, explained, resource_hint
from kprobefs.mount_options import (
    KERNEL_KPROBES,
    LINUX_PROFILES,
    MODEL_CLOCK,
    REAL_CLOCK,
    MountOptions,
    check_image,
    chosen_cpu,
    runs_linux,
)

if TYPE_CHECKING:
    from emulated_kernel.guests.common.host_processes import ProcessWatch
    from emulated_kernel.guests.linux.cpu.production_cpu import ProductionCpu
    from emulated_kernel.guests.linux.guest.tasks import LinuxTasks
    from emulated_kernel.image.linux.linux_kernel import LinuxKernel
    from emulated_kernel.kprobes.profile import Profile
    from emulated_kernel.vfs.core.node import Owner
    from emulated_kernel.vfs.mount import Mount
    from kprobefs.common.progress import Progress
    from kprobefs.daemon.state.saved_state import SavedState


def prepare(options: MountOptions) -> None:
    """Boot the distribution's kernel, or convert the vmcore, if the options name one.

    This takes seconds, and shows the progress on a terminal. The result is cached for build_kernel(). Raises:
    CliError (the file is unusable, or the boot fails).
    """
    if options.vmcore is not None:
        _convert_vmcore(options.vmcore)
    elif runs_linux(options):
        _boot_linux(options)


def build_kernel(options: MountOptions) -> Mount:
    """Build the kernel that the options describe, and return its mount.

    The current user owns the mount's files. Raises: CliError (the kernel cannot be built).
    """
    if options.vmcore is not None:
        return _vmcore_mount(options, options.vmcore)
    if not runs_linux(options):
        return _builtin_mount(options)
    if options.kprobes == KERNEL_KPROBES:
        return _native_mount(options)
    return _probed_mount(options)


def _builtin_mount(options: MountOptions) -> Mount:
    from emulated_kernel.guests.builtin.trees.root_layout import RootLayout
    from emulated_kernel.guests.common.host_processes import HostProcesses
    from kprobefs.daemon.reboot import RebootableKernel

    if options.machine.image is not None:
        check_image(options.machine.image)
    try:
        watch: Callable[[], ProcessWatch] = HostProcesses
        if options.isolate:
            from emulated_kernel.guests.builtin.processes.isolated import IsolatedProcesses

            watch = IsolatedProcesses
        layout = RootLayout(options.layout)
        return RebootableKernel(options.machine, layout, _owner(), watch, _state(options)).mount
    except OSError as error:
        image = options.machine.image
        why = resource_hint(error) or error.strerror or str(error)
        raise (CliError(f"{image}: {why}", ExitStatus.USAGE) if image else CliError(why)) from error


def _state(options: MountOptions) -> SavedState | None:
    """Return the SavedState for the directory that option --state names, or None without this option.

    Raises: CliError (the directory is unusable, or another daemon uses it).
    """
    if options.state is None:
        return None
    from kprobefs.daemon.state.saved_state import SavedState
    from kprobefs.daemon.state.state_directory import StateDirectory

    return SavedState(StateDirectory(options.state), "tracing/" if options.layout == "tracefs" else "")


@garbage_collection_stopped()
def _boot_linux(options: MountOptions) -> None:
    """Boot the distribution's kernel, show a progress bar, and store a snapshot in the boot cache."""
    import logging

    from emulated_kernel.guests.linux.boot_cache import ensure_cached

    # The daemon, and its log, do not exist yet.
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(logging.Formatter("kprobefs: %(message)s"))
    image = str(options.machine.image)
    bar: Progress | None = None
    shown = 0

    def progress(done: int, total: int) -> None:
        nonlocal bar, shown
        if bar is None:
            from kprobefs.common.progress import Progress

            bar = Progress("booting", total)
        bar.add(done - shown)
        shown = done

    with explained(image):
        ensure_cached(image, options.machine.seed, progress, _cpu(options))
    if bar is not None:
        bar.end()


def _native_mount(options: MountOptions) -> Mount:
    """Return the mount of a distribution's kernel whose text is probed by the kernel's own kprobes."""
    from emulated_kernel.guests.common.host_processes import HostProcesses
    from emulated_kernel.guests.linux.boot_cache import started
    from emulated_kernel.guests.linux.mounts.native_mount import native_mount
    from emulated_kernel.image.linux.module_files import ModuleFiles
    from emulated_kernel.image.linux.open_image import kernel_file

    image = str(options.machine.image)
    with explained(image):
        tasks = started(image, options.machine.seed, _cpu(options))
        modules = ModuleFiles(kernel_file(image), tasks.release, [*map(Path, options.modules)])
        _start_clock(options, tasks)
    served = native_mount(
        tasks,
        HostProcesses(),
        _owner(),
        modules,
        is_tracefs=options.layout == "tracefs",
        is_clock_real=options.machine.clock == REAL_CLOCK,
    )
    served.has_native_traps = tasks.machine.delivers_breakpoints
    served.architecture = tasks.machine.abi.name
    return served


def _probed_mount(options: MountOptions) -> Mount:
    """Return the mount of a distribution's kernel whose text is probed by kprobefs's own engine."""
    from emulated_kernel.guests.common.host_processes import HostProcesses
    from emulated_kernel.guests.linux.boot_cache import started_with_kernel
    from emulated_kernel.guests.linux.guest.passing_time import RealTime
    from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
    from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
    from emulated_kernel.image.linux.module_files import ModuleFiles
    from emulated_kernel.image.linux.open_image import kernel_file

    image = str(options.machine.image)
    with explained(image):
        tasks, kernel = started_with_kernel(image, options.machine.seed, _cpu(options))
        # Select the clock first, because the engine checks whether the guest's time is real.
        time = RealTime(tasks) if options.machine.clock == REAL_CLOCK else None
        profile = _linux_profile(options, kernel)
        engine = LinuxEngine(tasks, kernel, profile, pauses=options.machine.pauses)
        _start_clock(options, tasks)
        modules = ModuleFiles(kernel_file(image), tasks.release, [*map(Path, options.modules)])
    served = probed_mount(
        engine, HostProcesses(), _owner(), modules, is_tracefs=options.layout == "tracefs", time=time
    )
    served.has_native_traps = engine.machine.hooks.is_native
    served.architecture = kernel.architecture
    # Most pages of the kernel's file are read only at the start.
    kernel.release_pages()
    return served


def _start_clock(options: MountOptions, tasks: LinuxTasks) -> None:
    """Make the guest's clock count the guest's instructions, if the options select the model clock.

    Raises: CliError (the instructions of this guest cannot be counted).
    """
    if options.machine.clock != MODEL_CLOCK:
        return
    try:
        tasks.machine.count_instructions()
    except KernelError as error:
        raise CliError(f"--clock {MODEL_CLOCK}: {error.strerror}", ExitStatus.USAGE) from error


def _cpu(options: MountOptions) -> ProductionCpu | None:
    return None if options.cpu is None else chosen_cpu(options.cpu)


def _linux_profile(options: MountOptions, kernel: LinuxKernel) -> Profile:
    """Return the profile that the options name, with the strategy that the options name.

    If the options name no profile, return the profile of the kernel's version. The profiles for RISC-V apply
    to any version. Raises: CliError (the profile is not for the kernel's processor).
    """
    from emulated_kernel.guests.linux.probing.detect_interface import profile_of
    from emulated_kernel.kprobes.profile import RISCV_PROFILES, profile_named, with_strategy

    name = options.machine.profile
    if options.follows_version:
        profile = profile_of(kernel)
    elif kernel.architecture == "arm64":
        why = f"--profile: a kernel for arm64 has the profile of its version, and not {name}; omit --profile"
        raise CliError(why, ExitStatus.USAGE)
    elif name in RISCV_PROFILES:
        if kernel.architecture != "riscv64":
            known = " or ".join(LINUX_PROFILES)
            why = f"--profile: {name} is for riscv64, and the kernel for {kernel.architecture}"
            why += f"; use {known}, or leave it out: the kernel's version decides"
            raise CliError(why, ExitStatus.USAGE)
        profile = profile_of(kernel, name)
    else:
        profile = profile_named(name)
    return with_strategy(profile, options.machine.strategy)


def _convert_vmcore(vmcore: str) -> None:
    """Convert a vmcore to a snapshot in the cache, so that the mount can start from the snapshot."""
    from emulated_kernel.guests.linux.vmcore.vmcore_guest import ensure_core_cached

    with explained(vmcore):
        ensure_core_cached(vmcore)


def _vmcore_mount(options: MountOptions, vmcore: str) -> Mount:
    """Return the mount of the kernel in a vmcore."""
    from emulated_kernel.guests.linux.probing.probe_engine import KernelEngine
    from emulated_kernel.guests.linux.vmcore.vmcore_guest import started_core
    from emulated_kernel.guests.linux.vmcore.vmcore_mount import vmcore_mount
    from emulated_kernel.image.linux.unusable import read_as, unmapped
    from emulated_kernel.machine.traps.trap import HardwareError, MemoryFault

    try:
        with explained(vmcore), read_as("dump"):
            guest, kernel = started_core(vmcore)
            engine = KernelEngine(guest, kernel, _linux_profile(options, kernel))
            served = vmcore_mount(guest, engine, _owner(), is_tracefs=options.layout == "tracefs")
            served.has_native_traps = engine.machine.hooks.is_native
            served.architecture = kernel.architecture
            return served
    except MemoryFault as fault:
        why = unmapped(fault.address)
        raise CliError(f"{vmcore}: not a usable dump: {why}", ExitStatus.USAGE) from fault
    except (HardwareError, LookupError, struct.error) as error:
        message = f"{vmcore}: not a usable dump: its kernel's structures lead nowhere: {error}"
        raise CliError(message, ExitStatus.USAGE) from error


def _owner() -> Owner:
    from emulated_kernel.vfs.core.node import Owner

    return Owner(os.geteuid(), os.getegid())
