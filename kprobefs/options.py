"""MountOptions: what a daemon serves, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from emulated_kernel.kprobes import profile
from kprobefs.failure import Failure

if TYPE_CHECKING:
    from emulated_kernel.config import MachineConfig
    from emulated_kernel.vfs.mount import Mount

LAYOUTS = ("full", "tracefs")
ARCHITECTURES = ("x86_64", "i386", "riscv64", "riscv64i")
CLOCKS = ("virtual", "real")
PROFILES = tuple(profile.PROFILES)
RETURN_HOOKS = tuple(profile.RETURN_HOOKS)
DETOURS = tuple(saving.value for saving in profile.Saving)


@dataclass(frozen=True)
class MountOptions:
    """One mount; `directory` is absolute, without symbolic links."""

    directory: str
    machine: MachineConfig
    layout: str = "full"
    private: bool = False
    """Root's mount is for root alone; anybody else's is for its owner in any case."""

    @property
    def source(self) -> str:
        """First field in /proc/mounts: what the root directory looks like to tools that search there."""
        return "tracefs" if self.layout == "tracefs" else "debugfs"


class Builder(Protocol):
    """Makes the Mount that is served: the emulated kernel, or something smaller in tests."""

    def __call__(self, options: MountOptions) -> Mount: ...


def build_kernel(options: MountOptions) -> Mount:
    """Boot an emulated kernel; its files belong to the user who mounts. Raises: Failure."""
    import os

    from emulated_kernel.host.processes import HostProcesses
    from emulated_kernel.kernel import Kernel
    from emulated_kernel.vfs.layout import Layout
    from emulated_kernel.vfs.node import Owner

    try:
        kernel = Kernel(options.machine, HostProcesses())
    except OSError as error:
        place = f"{options.machine.image}: " if options.machine.image else ""
        raise Failure(f"{place}{error.strerror or error}") from error
    return kernel.mount(Layout(options.layout), Owner(os.geteuid(), os.getegid()))
