"""The root directory of a mount, and the files of machine/ that all kernels have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from emulated_kernel.components.records import KernelComponents
from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.events.registry import EventRegistry, EventWatcher
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Directory, Node, Owner, UnlistedDirectory
from emulated_kernel.vfs.core.node_tree import CONTROL, NodeTree
from emulated_kernel.vfs.core.seq_file import PerClientFile, Records, SeqFile, listing, single
from emulated_kernel.vfs.trees.debugfs import kprobes_directory
from emulated_kernel.vfs.trees.sysctl import sysctl_directory
from emulated_kernel.vfs.trees.tracefs import kprobe_events_file, kprobe_profile_file, tracefs_directory


def root_tree(
    kernel: KernelComponents,
    owner: Owner,
    machine: Mapping[str, Node],
    mounted_on: Mapping[str, Node],
    *,
    is_tracefs: bool,
    log: Callable[[str], None] | None = None,
) -> NodeTree:
    """Return the tree of control files of a mount.

    `machine`: name -> file of machine/. `mounted_on`: name -> directory of the root on which files of the
    guest itself are mounted; not used if `is_tracefs` is True. In that case, the root is tracefs, and
    kprobes/, machine/ and sysctl/ are in the directory CONTROL, which listings omit. `log` writes to the
    kernel log; see kprobes_directory().
    """
    tracing = kernel.tracing
    control: dict[str, Node] = {
        "kprobes": kprobes_directory(kernel, owner, log),
        "machine": Directory(0o755, machine),
        "sysctl": sysctl_directory(kernel.engine.kprobes, tracing.stack_tracer),
    }
    if is_tracefs:
        unlisted = {CONTROL: UnlistedDirectory(0o755, control)}
        return _watching(tracing.system.events, NodeTree(tracefs_directory(tracing, unlisted), owner))
    root: dict[str, Node] = {
        "kprobes": control["kprobes"],
        "kprobe_events": kprobe_events_file(tracing.kprobe_events),
        "kprobe_profile": kprobe_profile_file(tracing.kprobe_events),
        "tracing": tracefs_directory(tracing),
        **control,
        **mounted_on,
    }
    return _watching(tracing.system.events, NodeTree(Directory(0o755, root), owner))


class _Removals(EventWatcher):
    """Reports each removal of an event to the tree. The kernel itself removes no other directories."""

    def __init__(self, tree: NodeTree) -> None:
        self._tree = tree

    def event_added(self, event: TraceEvent) -> None:
        """Do nothing, because no front end caches that a name does not exist."""

    def event_removed(self, event: TraceEvent) -> None:
        self._tree.removed(f"{event.group}/{event.name}")


def _watching(registry: EventRegistry, tree: NodeTree) -> NodeTree:
    registry.watch(_Removals(tree))
    return tree


def machine_files(
    banner: str, kallsyms: KernelSymbols, log: Callable[[], Iterable[str]], owner: Owner
) -> dict[str, Node]:
    """Return the files of machine/ that all kernels have: name -> file.

    `banner` is the text of `version`. `log` returns the lines of `dmesg`. Only root and `owner` see addresses
    in `kallsyms`.
    """

    def symbols(client: Client) -> Records:
        return partial(kallsyms.kallsyms_lines, zero_addresses=not owner.is_privileged(client))

    return {
        "version": SeqFile(0o444, single(lambda: banner)),
        "kallsyms": PerClientFile(0o444, symbols),
        "dmesg": SeqFile(0o400, listing(log)),
    }
