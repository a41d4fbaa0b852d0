"""PlannedKernel: the kernel for which probes are planned, from a file or a dump, or the built-in one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from emulated_kernel.arch.analysis.probe_rules import ProbeRule
from emulated_kernel.image.builtin_image import KernelImage, load_image
from emulated_kernel.image.kallsyms import Symbol
from emulated_kernel.image.linux.btf import Btf
from emulated_kernel.image.linux.btf_members import beginning_with
from emulated_kernel.image.linux.kernel_events import KernelEvent
from emulated_kernel.image.linux.linked_module import LinkedModule, link_modules
from emulated_kernel.image.linux.linux_kernel import LinuxKernel, ReturnThunks
from emulated_kernel.image.linux.module_files import ModuleFiles
from emulated_kernel.image.linux.open_image import kernel_file
from emulated_kernel.image.live_image import LiveImage, Module
from emulated_kernel.image.prototypes import load_argument_counts
from emulated_kernel.image.text_tables import ProbedTables, Range
from emulated_kernel.image.trace_events import EventDefinition, event_definitions, syscall_definitions
from emulated_kernel.image.types_file import load_types
from emulated_kernel.kprobes.profile import KERNEL_INTERFACE, Profile, with_strategy
from emulated_kernel.trace.events import syscall_events
from emulated_kernel.trace.events.ftrace_entries import ftrace_entry_events
from emulated_kernel.trace.events.print_event import PrintEvent
from emulated_kernel.trace.events.static_event import layout_fields
from emulated_kernel.trace.interface import LINUX_6_1, Interface, interface_named
from emulated_kernel.trace.ring.trace_entry import EventField
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.linux_rule import series_of
from kprobefs.common.errors import CliError, ExitStatus, escape_for_terminal, explained
from kprobefs.measure.coverage_subject import WITH_OPTPROBES, Subject, booted_kernel, modules_on_cpu
from kprobefs.measure.verdicts import Judge, chosen_profile, own_profile
from kprobefs.mount_options import KERNEL_KPROBES, KPROBES
from kprobefs.plan.clones import clone_names, clones_by_function

ONLY_COUNTED = "this kernel counts the hits of a breakpoint, but records none of them; Linux 7.2 records them"
"""Sentence for the output about breakpoints; see PlannedKernel.records_breakpoints."""
UNGUARDED = (
    "this kernel accepts the probe, but ftrace patches this instruction too: a tracer and the probe destroy "
    "each other's code; take a place after the fentry site"
)
"""Sentence for the output about places in fentry sites; see Explanation.is_unguarded."""
_RETURN_TRAP = "kretprobe_brk_handler"
"""Symbol of the function that handles the breakpoint of the return trampoline."""
_ALLOWED = "kprobes_allow_optimization"
"""Symbol of the variable that sysctl debug.kprobes-optimization shows and sets."""


_TRIGGERS = {
    "traceon": "traceon_trigger", "traceoff": "traceoff_trigger", "snapshot": "snapshot_trigger",
    "stacktrace": "stacktrace_trigger", "enable_event": "event_enable_trigger",
    "disable_event": "event_enable_trigger", "hist": "event_hist_trigger",
    "enable_hist": "hist_enable_trigger", "disable_hist": "hist_enable_trigger",
}  # fmt: skip
"""Name of a trigger -> Linux's function that performs it; a kernel built without the trigger lacks it.

Mirrors: kernel/trace/trace_events_trigger.c, kernel/trace/trace_events_hist.c (v6.12).
"""


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel whose return instructions are rewritten in one of the ways that boot may choose."""

    returns: str
    """Name of the way in which returns are rewritten (a value of ReturnThunks); "" if they are unchanged."""
    judge: Judge


class PlannedKernel:
    """A kernel's tables and text, and the rules for its probes."""

    def __init__(
        self, title: str, arch: str, core: LinuxKernel | KernelImage, profile: Profile, cpu_description: str
    ) -> None:
        self.title = title
        self.arch = arch
        self.core = core
        """The kernel without modules."""
        self.profile = profile
        self.has_own_kprobes = False
        """Whether the verdicts are those of the kernel's own kprobes; if False, of kprobefs's kprobes.

        It is always False on x86, where both have the same verdicts.
        """
        self.has_own_tracefs = False
        """Whether answers are for the kernel's own tracefs (`--kprobes kernel`); if False, for kprobefs's."""
        self.strategy: str | None = None
        """Optimization policy whose verdicts are given in addition to Linux's, or None for only Linux's."""
        self.image: str | None = None
        """Path of the kernel's file or package; None for a dump and for the built-in kernel."""
        self._linked: tuple[LinkedModule, ...] = ()
        """Loaded modules, with the text of their files, in the order of loading."""
        self._contents: Mapping[str, bytes] = {}
        """Name of a loaded module -> contents of its file, in the order of loading."""
        self._cpu: str | None = None
        """Value of option --cpu; None if the option is not given."""
        self._files: ModuleFiles | None = None
        """Files of the package's modules, which this kernel and its copies share; None until one is read."""
        self.cpu_description = cpu_description
        """Description, for the output, of the CPUs to which the verdicts apply."""
        self._remarks: tuple[str, ...] = ()
        self.is_dump = False
        """Whether the kernel comes from a memory dump, with the text and data of a running kernel."""
        self.is_booted = False
        """Whether the text is in the state after boot, as in a dump or with option --cpu."""

    @cached_property
    def interface(self) -> Interface:
        """Return the interface of tracefs in a mount of the kernel. It decides the syntax of definitions."""
        if self.profile.interface != KERNEL_INTERFACE or not isinstance(self.core, LinuxKernel):
            return interface_named(self.profile.interface)
        from emulated_kernel.guests.linux.probing.detect_interface import interface_with

        return interface_with(self.core, self.profile)

    @cached_property
    def tables(self) -> ProbedTables:
        """Return the tables of the kernel and its modules.

        If `is_booted` is True, the text is that after boot; otherwise it is as in the files.
        """
        return self._with_modules(self.core, None)

    def _with_modules(self, core: LinuxKernel | KernelImage, returns: ReturnThunks | None) -> ProbedTables:
        """Return the tables of `core` and the modules.

        `returns`: way in which the return instructions of the modules are rewritten. None: they are rewritten
        like those of `core` if the kernel is booted, and stay unchanged if not.
        """
        if returns is None and self.is_booted and isinstance(core, LinuxKernel):
            returns = core.booted_returns
        if not self.modules:
            return core
        live: LiveImage[Any] = LiveImage(core)
        live.put_all(each.module if returns is None else each.booted(returns) for each in self.modules)
        return live

    def with_modules(self, names: Iterable[str]) -> PlannedKernel:
        """Return a copy of this kernel with the modules `names` of its package and their dependencies.

        Raises: CliError (there is no such module, or this kernel does not come from a package).
        """
        core = self.core
        if self.image is None or not isinstance(core, LinuxKernel):
            where = escape_for_terminal(", ".join(names))
            why = "only a kernel's package has modules; give --image, or mount the kernel"
            if self.is_dump:
                why = "only a mount reads the modules of a dump; mount it"
            raise CliError(f"{where}: {why} and read the event's `reason`", ExitStatus.USAGE)
        with explained(self.image):
            # If the package were opened again, it would be unpacked again.
            self._files = self._files or ModuleFiles(kernel_file(self.image), core.release)
            files: dict[str, bytes] = {}
            for name in names:
                files |= {each: data for each, data in self._files.read(name) if each not in files}
            found = PlannedKernel(self.title, self.arch, core, self.profile, self.cpu_description)
            found._files = self._files
            found.image = self.image
            found._remarks = self._remarks
            found.is_booted = self.is_booted
            found._cpu = self._cpu
            found.has_own_kprobes = self.has_own_kprobes
            found.has_own_tracefs = self.has_own_tracefs
            found.strategy = self.strategy
            found._linked = tuple(link_modules(core, [*files.items()]))
            found._contents = files
            return found

    @cached_property
    def modules(self) -> Sequence[LinkedModule]:
        """Return the loaded modules.

        With --cpu, their text is that after an emulated guest has loaded them, because a kernel patches
        modules when it loads them. A module that the guest cannot load has the text of its file.
        """
        core = self.core
        if self._cpu is None or self.image is None or not self._linked or not isinstance(core, LinuxKernel):
            return self._linked
        loaded: Sequence[Module] = ()
        with suppress(KernelError):
            loaded = modules_on_cpu(self.image, self._cpu, self._contents.values())
        there = {each.name for each in loaded}
        others = [(name, data) for name, data in self._contents.items() if name not in there]
        if others:
            names = escape_for_terminal(", ".join(name for name, _ in others))
            why = "the emulated machine cannot load it, so the text is that of the file, without patches"
            self._remarks += (f"{names}: {why} for the CPU",)
        return *(LinkedModule(each, ()) for each in loaded), *link_modules(core, others, loaded)

    @property
    def remarks(self) -> Sequence[str]:
        """Sentences for the output about the CPUs, kprobes and modules to which the verdicts apply."""
        # If a guest cannot load the modules, a remark says so.
        _ = self.modules
        return self._remarks

    def remark(self, remarks: Iterable[str]) -> None:
        """Append the given sentences to the property `remarks`, except those that it already contains."""
        self._remarks = tuple(dict.fromkeys((*self._remarks, *remarks)))

    def with_module_of(self, module: str, symbol: str) -> PlannedKernel:
        """Return a copy of this kernel with `module` loaded, for a place MODULE:SYMBOL.

        Raises: CliError (as with_modules(); the message says if the kernel itself has the symbol).
        """
        try:
            return self.with_modules([module])
        except CliError as error:
            if not self.tables.kallsyms.by_name(symbol):
                raise
            why = f"{error}; or leave the module out: the kernel itself has {escape_for_terminal(symbol)}"
            raise CliError(why, error.status) from error

    @cached_property
    def judge(self) -> Judge:
        """Return the Judge, which decides how Linux treats a probe in the kernel.

        The judge sees the kernel's text as in `tables`.
        """
        subject = Subject(self.title, self.arch, self.tables, has_own_kprobes=self.has_own_kprobes)
        return Judge(subject, self.profile)

    @property
    def records_breakpoints(self) -> bool:
        """Whether hits of breakpoints are recorded.

        They are only counted by Linux's own kprobes on RISC-V before v7.2.
        """
        core = self.core
        if not self.has_own_kprobes or self.arch != "riscv64" or not isinstance(core, LinuxKernel):
            return True
        return ProbeRule.RISCV_RECORDS in ProbeRule.of(series_of(core.release))

    @property
    def traps_at_return(self) -> bool:
        """Whether the kernel's own return probes begin their trampoline with a breakpoint, as on arm64.

        It is False if the verdicts are those of kprobefs's kprobes.

        Mirrors: arch/arm64/kernel/probes/kprobes_trampoline.S:__kretprobe_trampoline (v6.12).
        """
        return self.has_own_kprobes and self.tables.kallsyms.lookup_name(_RETURN_TRAP) is not None

    @property
    def has_linked_addresses(self) -> bool:
        """Whether the addresses are those in a distribution's kernel file; KASLR changes them at boot.

        It is False for a dump, which has the addresses of a running kernel, and for kprobefs's own kernel.
        """
        return isinstance(self.core, LinuxKernel) and not self.is_dump

    @property
    def has_optprobes(self) -> bool | None:
        """Whether the kernel was built with CONFIG_OPTPROBES; None if its symbols do not say so."""
        return self.judge.subject.has_optprobes

    @property
    def allows_jumps(self) -> bool | None:
        """Whether sysctl debug.kprobes-optimization is 1 in a dump; None for other kernels, or if unknown."""
        address = self.tables.kallsyms.lookup_name(_ALLOWED)
        if not self.is_dump or address is None:
            return None
        return self.tables.read(address, 1) != b"\0"

    @cached_property
    def whole(self) -> Variant:
        """The kernel in which boot has rewritten all return instructions as on the CPU of `cpu_description`.

        If the kernel has no return thunks or has booted already, its text is unchanged.
        """
        core = self.core
        if not isinstance(core, LinuxKernel) or not self._returns:
            return Variant("", self.judge)
        returns = self._returns[0]
        tables = self._with_modules(core.booted(returns), returns)
        return Variant(returns.value, Judge(Subject(self.title, self.arch, tables), self.profile))

    def variant(self, symbol: Symbol) -> Variant:
        """Return the kernel in which boot has rewritten the return instructions of the function `symbol`.

        Those of all modules are rewritten, too; the rest of the kernel's text is unchanged. They are
        rewritten as on the CPU of `cpu_description`. If the kernel has no return thunks or has booted
        already, nothing is rewritten.
        """
        return self._as_booted(symbol, self._returns[0] if self._returns else None)

    def other_variants(self, symbol: Symbol) -> Iterator[Variant]:
        """Yield variants with a function's return instructions as boot rewrites them on other CPUs.

        There is one variant for each further way in which boot may rewrite them, besides that of variant().
        There is none if the kernel has no return thunks or has booted already.
        """
        return (self._as_booted(symbol, returns) for returns in self._returns[1:])

    @property
    def _returns(self) -> Sequence[ReturnThunks]:
        return self.core.returns if isinstance(self.core, LinuxKernel) and not self.is_booted else ()

    def _as_booted(self, symbol: Symbol, returns: ReturnThunks | None) -> Variant:
        core = self.core
        if returns is None or not isinstance(core, LinuxKernel):
            return Variant("", self.judge)
        if symbol.address in range(*core.text):
            core = core.booted(
                returns, Range(symbol.address, min(symbol.address + symbol.size, core.text.end))
            )
        tables = self._with_modules(core, returns)
        return Variant(returns.value, Judge(Subject(self.title, self.arch, tables), self.profile))

    @cached_property
    def ways(self) -> Mapping[int, Sequence[int]]:
        """Return a map: address of an instruction -> further addresses where execution may continue after it.

        The further addresses are the targets of jump labels that may be patched in, and the fixups of
        instructions that fault.
        """
        ways: dict[int, list[int]] = {}
        for code, target, _ in self.tables.jump_labels:
            ways.setdefault(code, []).append(target)
        for insn, fixup in self.tables.ex_table:
            ways.setdefault(insn, []).append(fixup)
        return ways

    def clones(self, function: str, module: str | None) -> Sequence[str]:
        """Return the names of the functions that the compiler made from `function`, such as `f.isra.0`.

        `module`: name of the module that contains `function`; None for the kernel itself.
        """
        return self._clones.get(module, {}).get(function, ())

    @cached_property
    def _clones(self) -> Mapping[str | None, Mapping[str, Sequence[str]]]:
        """Name of a module, or None for the kernel -> name of a function -> the functions made from it."""
        own = {None: clones_by_function(clone_names(self.core.kallsyms))}
        modules = (each.module for each in self.modules)
        return own | {each.name: clones_by_function(map(str, each.symbols)) for each in modules}

    @cached_property
    def btf(self) -> Btf | None:
        """Return the descriptions of the kernel's types, or None if the kernel has no BTF."""
        core = self.core
        if isinstance(core, KernelImage):
            return load_types(core.path)
        return core.btf if core.has_btf else None

    @cached_property
    def larger_structures(self) -> Mapping[int, Sequence[int]]:
        """Return a map: type id of a structure -> type ids of structures with it as their first member.

        The map is empty if the kernel has no BTF.
        """
        return {} if self.btf is None else beginning_with(self.btf)

    @property
    def static_events(self) -> Iterator[tuple[str, str, tuple[EventField, ...]]]:
        """Group, name and fields of each event that the kernel itself has.

        If has_event_names is False, these are only the events of the group ftrace. The fields are empty if
        they are not known, as for system calls.
        """
        core = self.core
        word = self.judge.arch.word_size
        for own in (PrintEvent(word, 0), *ftrace_entry_events(word, LINUX_6_1)):
            yield own.group, own.name, own.fields
        if isinstance(core, KernelImage):
            yield from _with_fields(event_definitions(core))
            for call in syscall_definitions(core):
                yield from (
                    (syscall_events.GROUP, name, ()) for name in syscall_events.event_names(call.name)
                )
        elif self.btf is not None:
            yield from _with_fields(core.events)

    @property
    def has_event_names(self) -> bool:
        """Whether the names of the kernel's own events are known.

        Those of a distribution's kernel are known only if it has BTF.
        """
        return isinstance(self.core, KernelImage) or self.btf is not None

    @property
    def triggers(self) -> Collection[str]:
        """Names of the commands that the `trigger` files of events accept, such as traceon and hist."""
        return [name for name, function in _TRIGGERS.items() if self.has_feature(function)]

    def has_feature(self, function: str) -> bool:
        """Return True if the kernel has `function`, and so the feature that it belongs to.

        kprobefs's own tracefs has all features, so return True for it.
        """
        return not self.has_own_tracefs or bool(self.tables.kallsyms.count_name(function))

    def argument_count(self, function: str) -> int | None:
        """Return the number of a function's parameters.

        Return None if it isn't known, as for all functions of a kernel other than the built-in one.
        """
        return self._argument_counts.get(function)

    @cached_property
    def _argument_counts(self) -> Mapping[str, int]:
        return load_argument_counts(self.core.path) if isinstance(self.core, KernelImage) else {}


def planned_kernel(
    arch: str | None,
    image: str | None,
    vmcore: str | None,
    profile_name: str | None,
    strategy: str | None = None,
    cpu: str | None = None,
    kprobes: str = KPROBES[0],
) -> PlannedKernel:
    """Return the kernel that --arch, --image, --vmcore, --profile, --strategy, --cpu and --kprobes name.

    An argument is None if the option is not given.

    Raises: CliError (no such kernel, image, dump, profile or CPU; the profile has no optimizer; options that
    exclude each other).
    """
    has_kernel = image is not None or vmcore is not None
    check_own_kprobes(kprobes, has_kernel=has_kernel, profile=profile_name, strategy=strategy)
    if cpu is not None and image is None:
        why = "only possible with a distribution's kernel; add --image, or leave it out"
        raise CliError(f"--cpu: {why}", ExitStatus.USAGE)
    made = _planned(arch, image, vmcore, profile_name, cpu)
    made.strategy = strategy
    made.has_own_tracefs = kprobes == KERNEL_KPROBES
    if made.has_own_tracefs:
        _use_own_kprobes(made)
    elif remarks := made.judge.remarks:
        made.title += " with kprobefs's kprobes"
        made._remarks += (*remarks[:-1], f"{remarks[-1]} (see --kprobes kernel)")
    try:
        with_strategy(made.profile, strategy)
    except KernelError as error:
        raise CliError(str(error.strerror), ExitStatus.USAGE) from error
    return made


def check_own_kprobes(kprobes: str, *, has_kernel: bool, profile: str | None, strategy: str | None) -> None:
    """Check that the other options allow `kprobes`, the value of --kprobes.

    `has_kernel`: whether --image or --vmcore is given. `profile`, `strategy`: values of these options, or
    None. Raises: CliError (they do not allow it).
    """
    if kprobes != KERNEL_KPROBES:
        return
    if not has_kernel:
        why = "no kernel given; add --image with a vmlinuz, a vmlinux, a .deb or host"
        raise CliError(f"--kprobes kernel: {why}", ExitStatus.USAGE)
    for option, value in (("--profile", profile), ("--strategy", strategy)):
        if value is not None:
            why = "not possible with --kprobes kernel, whose kernel decides; leave it out"
            raise CliError(f"{option}: {why}", ExitStatus.USAGE)


def _use_own_kprobes(made: PlannedKernel) -> None:
    """Make `made` give the verdicts of the kernel's own kprobes: set its profile and `has_own_kprobes`.

    Do nothing on x86, where kprobefs's kprobes have the same verdicts.
    """
    if made.arch in WITH_OPTPROBES:
        return
    assert isinstance(made.core, LinuxKernel)
    made.profile = own_profile(made.profile, made.core)
    made.has_own_kprobes = True


def _planned(
    arch: str | None, image: str | None, vmcore: str | None, profile_name: str | None, cpu: str | None
) -> PlannedKernel:
    with explained(image or vmcore or arch or ""):
        if vmcore is not None:
            return _dumped(vmcore, profile_name)
        if image is not None:
            if cpu is not None:
                return _booted(image, profile_name, cpu)
            return _distributed(image, profile_name)
        name = arch or "x86_64"
        core = load_image(None, name)
        profile = _profile(profile_name, name, core)
        return PlannedKernel(f"kprobefs's own kernel for {name}", name, core, profile, "the emulated CPU")


def _distributed(image: str, profile_name: str | None) -> PlannedKernel:
    from emulated_kernel.guests.linux.table_cache import kernel_from_file

    kernel = kernel_from_file(image).with_ftrace_sites()
    cpu_description = "a CPU for which boot writes plain returns" if kernel.returns else "any CPU"
    made = PlannedKernel(
        f"Linux {kernel.release}",
        kernel.architecture,
        kernel,
        _profile(profile_name, kernel.architecture, kernel),
        cpu_description,
    )
    made.image = image
    return made


def _booted(image: str, profile_name: str | None, cpu: str) -> PlannedKernel:
    """Return the kernel of the file `image` after its boot on the production CPU `cpu`."""
    kernel, report = booted_kernel(image, cpu)
    title = f"Linux {kernel.release}"
    profile = _profile(profile_name, "x86_64", kernel)
    made = PlannedKernel(title, "x86_64", kernel, profile, report.cpu_description)
    made.image = image
    made._remarks = tuple(report.remarks)
    made.is_booted = True
    made._cpu = cpu
    return made


def _with_fields(
    events: Iterable[EventDefinition | KernelEvent],
) -> Iterator[tuple[str, str, tuple[EventField, ...]]]:
    """Yield group, name and fields of events.

    The fields of system calls' events are empty, because the kernel makes these fields at boot.
    """
    for event in events:
        fields = () if event.system == syscall_events.GROUP else tuple(layout_fields(event.fields))
        yield event.system, event.name, fields


def _dumped(vmcore: str, profile_name: str | None) -> PlannedKernel:
    from emulated_kernel.guests.linux.vmcore.vmcore_guest import kernel_in_core

    kernel = kernel_in_core(vmcore)
    made = PlannedKernel(
        f"Linux {kernel.release}, a dump",
        "x86_64",
        kernel,
        _profile(profile_name, "x86_64", kernel),
        "",
    )
    made.is_dump = True
    made.is_booted = True
    made.cpu_description = f"the CPU of the dump: {_cpu_model(kernel)}"
    return made


def _cpu_model(kernel: LinuxKernel) -> str:
    """Return the name of the CPU on which a dumped kernel ran, or "unknown".

    Mirrors: arch/x86/include/asm/processor.h:struct cpuinfo_x86 (v6.1).
    """
    try:
        at = kernel.required("boot_cpu_data") + kernel.btf.offset("cpuinfo_x86.x86_model_id")
        return kernel.read(at, 64).partition(b"\0")[0].decode("ascii", "replace").strip() or "unknown"
    except KernelError:
        return "unknown"


def _profile(name: str | None, arch: str, tables: ProbedTables) -> Profile:
    try:
        return chosen_profile(name, arch, tables)
    except KernelError as error:
        raise CliError(str(error.strerror), ExitStatus.USAGE) from error
