"""RootLayout: selects the file tree at the mount's root."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from emulated_kernel.guests.builtin.kernel_components import BuiltinKernelComponents
from emulated_kernel.guests.builtin.trees.machine_dir import machine_tree
from emulated_kernel.vfs.core.node import Directory, Node, Owner
from emulated_kernel.vfs.core.node_tree import NodeTree
from emulated_kernel.vfs.trees.root import root_tree


class RootLayout(Enum):
    """Content of a mount's root directory."""

    FULL = "full"
    """kprobes/, tracing/, machine/, sysctl/, the guest's scratch/ and dev/, and two files of tracefs.

    The two files are kprobe_events and kprobe_profile.
    """
    TRACEFS = "tracefs"
    """The files of tracefs and the directory CONTROL, for mounts at the path where tools look for tracefs."""


def build_filesystem(
    kernel: BuiltinKernelComponents, layout: RootLayout, owner: Owner | None, further: Mapping[str, Node]
) -> NodeTree:
    """Return the file tree of a mount with `layout`, with the files in `further` added to machine/.

    The files belong to `owner`, or to root if `owner` is None.
    """
    owner = owner or Owner()
    # The guest's own file systems are mounted on these directories.
    mounted_on = {"scratch": Directory(0o1777, {}), "dev": Directory(0o755, {})}
    files = machine_tree(kernel, owner, further)
    is_tracefs = layout is RootLayout.TRACEFS
    return root_tree(kernel, owner, files, mounted_on, is_tracefs=is_tracefs, log=kernel.guest.log)
