"""Layouts: which tree stands at the mount's root."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from emulated_kernel.build import Parts
from emulated_kernel.vfs.core.node import Directory, Node, Owner, UnlistedDirectory
from emulated_kernel.vfs.core.tree import CONTROL, Filesystem
from emulated_kernel.vfs.trees.debugfs import kprobes_directory
from emulated_kernel.vfs.trees.machine import machine_directory
from emulated_kernel.vfs.trees.sysctl import sysctl_directory
from emulated_kernel.vfs.trees.tracefs import kprobe_events_file, kprobe_profile_file, tracefs_directory


class RootLayout(Enum):
    """What the root directory holds."""

    FULL = "full"
    """kprobes/, tracing/, machine/, sysctl/, the guest's scratch/ and dev/, and two files of tracefs."""
    TRACEFS = "tracefs"
    """tracefs itself, for mounting where tools look for it, and CONTROL."""


def build_filesystem(
    kernel: Parts, layout: RootLayout, owner: Owner | None, further: Mapping[str, Node]
) -> Filesystem:
    """The tree of `layout`, belonging to `owner` (root where not given), with `further` files of machine/."""
    owner = owner or Owner()
    control: dict[str, Node] = {
        "kprobes": kprobes_directory(kernel, owner, kernel.guest.log),
        "machine": machine_directory(kernel, owner, further),
        "sysctl": sysctl_directory(kernel.engine.kprobes, kernel.tracing.stack_tracer),
    }
    if layout is RootLayout.TRACEFS:
        unlisted = {CONTROL: UnlistedDirectory(0o755, control)}
        return Filesystem(tracefs_directory(kernel.tracing, unlisted), owner)
    root = Directory(
        0o755,
        {
            "kprobes": control["kprobes"],
            "kprobe_events": kprobe_events_file(kernel.tracing.kprobe_events),
            "kprobe_profile": kprobe_profile_file(kernel.tracing.kprobe_events),
            "tracing": tracefs_directory(kernel.tracing),
            "machine": control["machine"],
            "sysctl": control["sysctl"],
            # What the guest's own file systems are mounted on.
            "scratch": Directory(0o1777, {}),
            "dev": Directory(0o755, {}),
        },
    )
    return Filesystem(root, owner)
