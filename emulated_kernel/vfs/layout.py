"""Layouts: which tree stands at the mount's root."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from emulated_kernel.vfs.debugfs import kprobes_directory, return_hook_file
from emulated_kernel.vfs.machinefs import machine_directory
from emulated_kernel.vfs.node import Directory, Node, Owner
from emulated_kernel.vfs.ports import KprobesPort, MachinePort, ReturnHooksPort, StatsPort
from emulated_kernel.vfs.statsfs import stats_directory
from emulated_kernel.vfs.sysctl import sysctl_directory
from emulated_kernel.vfs.tracefs import (
    TracefsPorts,
    kprobe_events_file,
    kprobe_profile_file,
    tracefs_directory,
)
from emulated_kernel.vfs.tree import Filesystem


class Layout(Enum):
    """What the root directory holds."""

    FULL = "full"
    """kprobes/, tracing/, machine/, sysctl/, and the two kprobe files of tracefs beside them."""
    TRACEFS = "tracefs"
    """tracefs itself, for mounting where tools look for it."""


@dataclass(frozen=True)
class KernelPorts:
    """The parts of a kernel that its files are views of."""

    kprobes: KprobesPort
    stats: StatsPort
    tracefs: TracefsPorts
    machine: MachinePort
    return_hooks: ReturnHooksPort
    extra: Mapping[str, Node] = field(default_factory=dict)
    """Further directories of the full layout's root, such as scratch/ and dev/."""


def build_filesystem(
    ports: KernelPorts, layout: Layout = Layout.FULL, owner: Owner | None = None
) -> Filesystem:
    """The tree of `layout`, belonging to `owner` (root where not given)."""
    owner = owner or Owner()
    root = tracefs_directory(ports.tracefs) if layout is Layout.TRACEFS else _full_root(ports, owner)
    return Filesystem(root, owner)


def _full_root(ports: KernelPorts, owner: Owner) -> Directory:
    return Directory(
        0o755,
        {
            "kprobes": kprobes_directory(
                ports.kprobes,
                {
                    "return_hook": return_hook_file(ports.return_hooks),
                    "stats": stats_directory(ports.stats, owner),
                },
            ),
            "kprobe_events": kprobe_events_file(ports.tracefs.kprobe_events),
            "kprobe_profile": kprobe_profile_file(ports.tracefs.kprobe_events),
            "tracing": tracefs_directory(ports.tracefs),
            "machine": machine_directory(ports.machine, owner),
            "sysctl": sysctl_directory(ports.kprobes, ports.tracefs.stack),
            **ports.extra,
        },
    )
