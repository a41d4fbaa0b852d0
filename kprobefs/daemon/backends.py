"""Boots the kernel that the options mean, and makes its mount."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kprobefs.common.errors import CliError, ExitStatus, resource_hint
from kprobefs.mount_options import KERNEL_KPROBES, MountOptions, check_image, runs_linux

if TYPE_CHECKING:
    from kprobefs.daemon.state.saved_state import SavedState
    from kprobefs.mount_options import ServedMount


def _state(options: MountOptions) -> SavedState | None:
    """Raises: CliError (another daemon has it)."""
    if options.state is None:
        return None
    from kprobefs.daemon.state.saved_state import SavedState
    from kprobefs.daemon.state.state_directory import StateDirectory

    return SavedState(StateDirectory(options.state), "tracing/" if options.layout == "tracefs" else "")


def prepare(options: MountOptions) -> None:
    """What takes seconds is done while somebody watches: a boot, a dump that is read. Raises: CliError."""
    if options.vmcore is not None:
        from kprobefs.daemon import vmcores

        vmcores.prepare(options.vmcore)
    elif runs_linux(options):
        from kprobefs.daemon import native

        native.prepare(options)


def build_kernel(options: MountOptions) -> ServedMount:
    """Boot an emulated kernel; its files belong to the user who mounts. Raises: CliError."""
    if runs_linux(options):
        return _linux_mount(options)
    from emulated_kernel.guests.builtin.processes.isolated import IsolatedProcesses
    from emulated_kernel.guests.builtin.trees.root_layout import RootLayout
    from emulated_kernel.guests.common.host_processes import HostProcesses
    from emulated_kernel.vfs.core.node import Owner
    from kprobefs.daemon.reboot import RebootableKernel

    if options.machine.image is not None:
        check_image(options.machine.image)
    try:
        owner = Owner(os.geteuid(), os.getegid())
        watch = IsolatedProcesses if options.isolate else HostProcesses
        layout = RootLayout(options.layout)
        return RebootableKernel(options.machine, layout, owner, watch, _state(options)).mount
    except OSError as error:
        image = options.machine.image
        why = resource_hint(error) or error.strerror or str(error)
        raise (CliError(f"{image}: {why}", ExitStatus.USAGE) if image else CliError(why)) from error


def _linux_mount(options: MountOptions) -> ServedMount:
    # One of them: the others' modules are a third of a start.
    if options.vmcore is not None:
        from kprobefs.daemon.vmcores import core_mount

        return core_mount(options, options.vmcore)
    if options.kprobes == KERNEL_KPROBES:
        from kprobefs.daemon.native import native_mount

        return native_mount(options)
    from kprobefs.daemon.probed_linux import engine_mount

    return engine_mount(options)
