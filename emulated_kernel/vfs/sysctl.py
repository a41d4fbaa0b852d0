"""sysctl/: the part of /proc/sys that is about what this kernel has; names and values as there."""

from __future__ import annotations

from emulated_kernel.vfs.node import Directory, File, Node
from emulated_kernel.vfs.parse import sysctl_int, sysctl_switch
from emulated_kernel.vfs.ports import KprobesPort, StackTracerPort
from emulated_kernel.vfs.seq import AttributeFile

_MODE = 0o644


def sysctl_directory(kprobes: KprobesPort, stack: StackTracerPort | None) -> Directory:
    """debug/kprobes-optimization and kernel/stack_tracer_enabled, where the kernel has what they switch."""
    debug: dict[str, Node] = {}
    if kprobes.can_optimize:
        debug["kprobes-optimization"] = kprobes_optimization(kprobes)
    kernel: dict[str, Node] = {}
    if stack is not None:
        kernel["stack_tracer_enabled"] = AttributeFile(
            _MODE,
            show=lambda: f"{stack.enabled}\n",
            store=lambda data: stack.enable(sysctl_int(data)),
        )
    return Directory(0o555, {"debug": Directory(0o555, debug), "kernel": Directory(0o555, kernel)})


def kprobes_optimization(kprobes: KprobesPort) -> File:
    """debug.kprobes-optimization."""
    return AttributeFile(
        _MODE,
        show=lambda: f"{kprobes.optimization:d}\n",
        store=lambda data: kprobes.set_optimization(sysctl_switch(data)),
    )
