"""Tree of kprobefs's control files for a distribution's kernel: kprobes/, tracing/, sysctl/, machine/."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from emulated_kernel.guests.common.gdb_file import gdb_file
from emulated_kernel.guests.common.vmcore_file import VmcoreFile
from emulated_kernel.guests.linux.probing.probe_engine import KernelEngine
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.vfs.core.node import Node, Owner
from emulated_kernel.vfs.core.node_tree import NodeTree
from emulated_kernel.vfs.trees.limits_file import limits_file
from emulated_kernel.vfs.trees.root import machine_files, root_tree
from emulated_kernel.vfs.trees.stats import probes_file

_log = logging.getLogger("kprobefs.linux")


def vmcoreinfo(engine: KernelEngine) -> bytes:
    """Return the kernel's own VMCOREINFO; b"" if the kernel keeps none (CONFIG_CRASH_CORE).

    Mirrors: kernel/crash_core.c:vmcoreinfo_data (v6.1).
    """
    lookup = engine.kernel.kallsyms.lookup_name
    data = lookup("vmcoreinfo_data")
    size = lookup("vmcoreinfo_size")
    if data is None or size is None:
        return b""
    memory = engine.machine.memory
    try:
        return memory.read(memory.read_u64(data), min(memory.read_u64(size), PAGE_SIZE))
    except MemoryFault:
        return b""


def engine_tree(
    engine: KernelEngine,
    owner: Owner,
    log: Callable[[], bytes],
    machine: Mapping[str, Node],
    further: Mapping[str, Node],
    *,
    is_tracefs: bool,
) -> NodeTree:
    """Return the tree of control files for the kernel that `engine` probes.

    `log`: returns the kernel's log. `machine`: name -> additional file of machine/.
    `further`: name -> additional file or directory of the root.
    `is_tracefs`: tracefs is the root, and listings show nothing else; if False, tracefs is at tracing/.
    """
    banner = f"{engine.kernel.version}\nprofile {engine.kprobes.profile.title}\n"

    def shown_log() -> Iterator[str]:
        yield log().decode("utf-8", "surrogateescape")

    files = machine_files(banner, engine.components.tracing.symbols, shown_log, owner)
    files |= {
        "limits": limits_file(engine.components, engine.limits, _log.info),
        "probes": probes_file(engine.components),
        "gdb": gdb_file(engine.machine, engine.lock),
        "vmcore": VmcoreFile(engine.machine, partial(vmcoreinfo, engine)),
        **machine,
    }
    return root_tree(engine.components, owner, files, further, is_tracefs=is_tracefs)
