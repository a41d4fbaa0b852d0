"""The directory sysctl/: the supported sysctls, with their names and values in /proc/sys."""

from __future__ import annotations

from emulated_kernel.kprobes.hit.ftrace import FtraceSites
from emulated_kernel.kprobes.optimizer.optimizer import Optimizer
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.trace.tracers.stack_tracer import StackTracer
from emulated_kernel.vfs.core.attribute_file import SysctlFile
from emulated_kernel.vfs.core.kstrtox import sysctl_int, sysctl_switch
from emulated_kernel.vfs.core.node import Directory, Node
from emulated_kernel.vfs.core.open_file import File


def sysctl_directory(kprobes: Kprobes, stack: StackTracer) -> Directory:
    """Return the directory sysctl/.

    The directory has debug/kprobes-optimization if the kernel has an optimizer. It has
    kernel/ftrace_enabled and kernel/stack_tracer_enabled if the kernel has fentry sites.
    """
    debug: dict[str, Node] = {}
    if kprobes.optimizer is not None:
        debug["kprobes-optimization"] = kprobes_optimization(kprobes, kprobes.optimizer)
    kernel: dict[str, Node] = {}
    if kprobes.sites is not None:
        kernel["stack_tracer_enabled"] = SysctlFile(
            0o644, show=lambda: f"{stack.enabled}\n", store=lambda data: stack.enable(sysctl_int(data))
        )
        kernel["ftrace_enabled"] = _ftrace_enabled(kprobes, kprobes.sites)
    return Directory(0o555, {"debug": Directory(0o555, debug), "kernel": Directory(0o555, kernel)})


def _ftrace_enabled(kprobes: Kprobes, sites: FtraceSites) -> File:
    return SysctlFile(
        0o644,
        show=lambda: f"{sites.enabled}\n",
        store=lambda data: kprobes.set_ftrace_enabled(sysctl_int(data)),
    )


def kprobes_optimization(kprobes: Kprobes, optimizer: Optimizer) -> File:
    """Return the file of the sysctl debug.kprobes-optimization."""
    return SysctlFile(
        0o644,
        show=lambda: f"{optimizer.allowed:d}\n",
        store=lambda data: kprobes.set_optimization(sysctl_switch(data)),
    )
