"""Build the probe engine over any kernel: the registries of kprobes, jprobes, kretprobes and fprobes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.components.records import ProbeRegistries
from emulated_kernel.image.text_tables import ProbedTables
from emulated_kernel.kprobes.kinds.fprobe import Fprobes
from emulated_kernel.kprobes.kinds.jprobe import Jprobes
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobes
from emulated_kernel.kprobes.profile import Profile
from emulated_kernel.kprobes.quiescence import GracePeriod
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.kprobes.return_hook.hook_sets import HookSets, never_returning
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.fast_dataclass import dataclass


@dataclass(frozen=True, eq=False)
class ProbedKernel:
    """The input of build_probe_engine(): a kernel that has booted and is stopped."""

    machine: ProbedMachine
    tables: ProbedTables
    """Symbols and text tables of the kernel and its loaded modules."""
    image: ProbedTables
    """Symbols and text tables of the kernel without modules."""
    abi: Mapping[str, int]
    """Name, such as `task_struct.comm`, -> offset in bytes in a structure or per-CPU area.

    The names are those in the ABI table of kprobefs's own image.
    """
    arch: Arch
    grace_period: GracePeriod
    log: Callable[[str], None]
    """Function that writes a line to the kernel log."""
    lock: ControlLock
    profile: Profile
    cpus: int = 1
    return_hook: str | None = None
    """Key in RETURN_HOOKS; it selects the shadow stack that return probes use.

    None selects the profile's shadow stack.
    """


def build_probe_engine(kernel: ProbedKernel) -> ProbeRegistries:
    """Build the registries of all kinds of probes; no probe is registered yet.

    The registry of kprobes is built first, because the other registries use it. Kretprobes and fprobes share
    one set of return hooks, HookSets.first.
    """
    kprobes = _build_kprobes(kernel)
    hook_sets = _build_return_hooks(kernel, kprobes)
    kretprobes = _build_kretprobes(kernel, kprobes, hook_sets)
    return ProbeRegistries(
        kprobes=kprobes,
        jprobes=_build_jprobes(kernel, kprobes),
        kretprobes=kretprobes,
        hook_sets=hook_sets,
        fprobes=_build_fprobes(kernel, kprobes, kretprobes),
    )


def _build_kprobes(kernel: ProbedKernel) -> Kprobes:
    """Build the registry of kprobes.

    From then on, when the machine switches to another CPU, the registry uses that CPU's kprobe_ctlblk.
    """
    kprobes = Kprobes(
        kernel.machine,
        kernel.tables,
        kernel.arch,
        kernel.log,
        kernel.grace_period,
        kernel.lock,
        kernel.profile,
    )
    kernel.machine.on_switch.append(kprobes.hits.ctlblk.switch_to)
    return kprobes


def _build_return_hooks(kernel: ProbedKernel, kprobes: Kprobes) -> HookSets:
    """Build the return hooks that kretprobes, fprobes and the function graph share."""
    return HookSets(kernel.machine, kernel.abi, kernel.arch, kprobes, kernel.grace_period, kernel.return_hook)


def _build_kretprobes(kernel: ProbedKernel, kprobes: Kprobes, hook_sets: HookSets) -> Kretprobes:
    """Build the registry of kretprobes, which refuses functions that do not return to their caller."""
    blacklist = partial(never_returning, kernel.image, kernel.arch)
    return Kretprobes(kprobes, hook_sets.first, cpus=kernel.cpus, blacklist=blacklist)


def _build_jprobes(kernel: ProbedKernel, kprobes: Kprobes) -> Jprobes | None:
    """Build the registry of jprobes, or return None if the profile's kernel has no jprobes."""
    if not kernel.profile.jprobes:
        return None
    return Jprobes(kprobes, kernel.machine, kernel.arch)


def _build_fprobes(kernel: ProbedKernel, kprobes: Kprobes, kretprobes: Kretprobes) -> Fprobes:
    """Build the registry of fprobes.

    build_trace() must later add the list of traceable functions to the registry.
    """
    return Fprobes(kprobes, kretprobes.hooks, kernel.arch, cpus=kernel.cpus)
