"""The files of ours over a distribution's kernel: kprobes/, tracing/, sysctl/ and machine/."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from emulated_kernel.linux.engine import KernelEngine
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Directory, Node, Owner, UnlistedDirectory
from emulated_kernel.vfs.core.seq import PerClientFile, Records, SeqFile, listing, single
from emulated_kernel.vfs.core.tree import CONTROL, Filesystem
from emulated_kernel.vfs.trees.debugfs import kprobes_directory
from emulated_kernel.vfs.trees.stats import probes_file
from emulated_kernel.vfs.trees.sysctl import sysctl_directory
from emulated_kernel.vfs.trees.tracefs import kprobe_events_file, kprobe_profile_file, tracefs_directory


def engine_tree(
    engine: KernelEngine,
    owner: Owner,
    log: Callable[[], bytes],
    machine: Mapping[str, Node],
    further: Mapping[str, Node],
    *,
    is_tracefs: bool,
) -> Filesystem:
    """`log`: the kernel's; `machine`: further files of machine/; `further`: those of the root.

    `is_tracefs`: tracefs is the root, and all that is listed.
    """
    parts = engine.parts
    tracing, kprobes = parts.tracing, parts.engine.kprobes
    control: dict[str, Node] = {
        "kprobes": kprobes_directory(parts, owner),
        "machine": _machine_directory(engine, owner, log, machine),
        "sysctl": sysctl_directory(kprobes, tracing.stack_tracer),
    }
    if is_tracefs:
        unlisted = {CONTROL: UnlistedDirectory(0o755, control)}
        return Filesystem(tracefs_directory(tracing, unlisted), owner)
    root = Directory(
        0o755,
        {
            "kprobe_events": kprobe_events_file(tracing.kprobe_events),
            "kprobe_profile": kprobe_profile_file(tracing.kprobe_events),
            "tracing": tracefs_directory(tracing),
            **control,
            **further,
        },
    )
    return Filesystem(root, owner)


def _machine_directory(
    engine: KernelEngine, owner: Owner, log: Callable[[], bytes], further: Mapping[str, Node]
) -> Directory:
    kallsyms = engine.kernel.kallsyms
    version = f"{engine.kernel.version}\nprofile {engine.kprobes.profile.name}\n"

    def symbols(client: Client) -> Records:
        return single(lambda: kallsyms.kallsyms_text(not owner.is_privileged(client)))

    def shown_log() -> Iterator[str]:
        yield log().decode("utf-8", "surrogateescape")

    return Directory(
        0o755,
        {
            "version": SeqFile(0o444, single(lambda: version)),
            "kallsyms": PerClientFile(0o444, symbols),
            "dmesg": SeqFile(0o400, listing(shown_log)),
            "probes": probes_file(engine.parts),
            **further,
        },
    )
