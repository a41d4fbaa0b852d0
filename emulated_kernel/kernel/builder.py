"""Build a kernel of kprobefs's own: machine, guest, probe engine, tracing, modules, in this order."""

from __future__ import annotations

import errno
from functools import cache, partial

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.architectures import arch_named
from emulated_kernel.components.clock_switch import ClockSwitch
from emulated_kernel.components.guest_directories import GuestDirectories
from emulated_kernel.components.module_notifier import ModuleNotifier
from emulated_kernel.components.probe_engine import ProbedKernel, build_probe_engine
from emulated_kernel.components.records import ProbeRegistries, TracingComponents
from emulated_kernel.components.tracing import TracedKernel, build_trace
from emulated_kernel.guests.builtin.builtin_kernel import BuiltinKernel
from emulated_kernel.guests.builtin.guest import Guest, boot_guest
from emulated_kernel.guests.builtin.kernel_components import BuiltinKernelComponents
from emulated_kernel.guests.builtin.modules import Modules
from emulated_kernel.guests.builtin.workloads.workload import BuiltinWorkloads
from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.common.request_clock import RequestClock, RequestObserver
from emulated_kernel.guests.common.workloads import Workloads
from emulated_kernel.image.builtin_image import KernelImage, load_image
from emulated_kernel.image.kallsyms import Kallsyms
from emulated_kernel.image.live_image import LiveImage
from emulated_kernel.image.types_file import load_types
from emulated_kernel.kprobes.kinds.guest_probes import GuestProbes
from emulated_kernel.kprobes.observers import Observers
from emulated_kernel.kprobes.profile import Profile, RegisterSaving, profile_named, with_strategy
from emulated_kernel.kprobes.quiescence import GracePeriod
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.task_events import TaskEvents
from emulated_kernel.machine.traps.trap import GuestFault, HardwareError, MemoryFault
from emulated_kernel.trace.compiled.guest_addresses import NeedResched
from emulated_kernel.trace.context.probe_hit import ProbeHit, Tasks
from emulated_kernel.trace.context.trace_ctx import PerCpuContext
from emulated_kernel.trace.events.link_order import link_rank
from emulated_kernel.trace.events.static_keys import StaticKeys
from emulated_kernel.trace.events.syscall_user_data import UserDataSize
from emulated_kernel.trace.events.tracepoints import Tracepoints
from emulated_kernel.trace.interface import InterfaceRule, interface_named
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.util.abi import PAGE_SIZE, Hypercall
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import replace
from emulated_kernel.util.limits import Limit


def build(
    config: MachineConfig,
    watch: ProcessWatch,
    profile: Profile | None = None,
    lock: ControlLock | None = None,
) -> BuiltinKernelComponents:
    """Boot a kernel to its first system call, and build the probe engine and tracing for it.

    `profile` takes precedence over the profile that `config` names. `lock` is the held lock of the kernel
    that this one replaces, or None if it replaces none.

    Raises: KernelError ENOENT (no such architecture), ENOEXEC (no image, or one that does not boot), OSError
    (the image cannot be read).
    """
    profile = _select_profile(config, profile)
    live = LiveImage(load_image(config.image, config.arch))
    try:
        machine = Machine(config, live.core)
        try:
            return _build_on_machine(machine, live, watch, profile, lock or ControlLock())
        except BaseException:
            machine.close()
            raise
    except (GuestFault, HardwareError, MemoryFault) as error:
        # A kernel that stops before its first task has a defective image.
        raise KernelError(errno.ENOEXEC, f"{live.core.path.name} doesn't boot: {error}") from error


def _select_profile(config: MachineConfig, profile: Profile | None) -> Profile:
    """Return `profile`, or else the profile that `config` names, with the strategy and save_regs of `config`.

    Raises: KernelError EINVAL (with_strategy() refuses the strategy).
    """
    profile = with_strategy(profile or profile_named(config.profile), config.strategy)
    if config.save_regs is None:
        return profile
    return replace(profile, saving=RegisterSaving(config.save_regs))


def _build_on_machine(
    machine: Machine, live: LiveImage[KernelImage], watch: ProcessWatch, profile: Profile, lock: ControlLock
) -> BuiltinKernelComponents:
    """Build guest, probe engine, tracing and modules on the machine, in this order."""
    config = machine.config
    arch = arch_named(config.arch)
    # The front end sets lock.waiting later.
    watch.set_wait_context(lambda: lock.waiting())  # noqa: PLW0108
    guest = _boot(machine, live.core, watch, lock)
    clock = RequestClock(machine.clock, pauses=config.pauses)
    engine = build_probe_engine(_probed_kernel(machine, live, arch, guest, clock, lock, profile))
    tracing = build_trace(_traced_kernel(machine, live, arch, guest, engine), engine, arch)
    loops = _ranges(live.kallsyms, "strncpy_from_user", "do_strncpy_from_user")
    observers = Observers(engine.kprobes, machine.text.ledger, len(arch.breakpoint), loops)
    guest.sight = observers.sight
    requests = RequestObserver(clock, engine.kprobes)
    # The hook sets need no events, because this kernel itself drops the hooked calls of a task that ends.
    guest.runner.events.watch(requests, tracing.guest_records, tracing.arrays)
    _show_event_directories(machine, guest, tracing)
    return BuiltinKernelComponents(
        config=config,
        lock=lock,
        live=live,
        arch=arch,
        machine=machine,
        guest=guest,
        engine=engine,
        tracing=tracing,
        modules=_build_modules(machine, arch, live, guest, engine, tracing),
        requests=requests,
        clock=ClockSwitch(machine.clock, tracing.arrays, lock),
        loads=Workloads(BuiltinWorkloads(guest, requests), lock),
    )


def _ranges(symbols: Kallsyms, *names: str) -> list[range]:
    """Return the address ranges of the functions `names`. Ignore names of which there is no symbol."""
    found = [symbol for name in names for symbol in symbols.by_name(name)]
    return [range(each.address, each.address + each.size) for each in found]


def _boot(machine: Machine, image: KernelImage, watch: ProcessWatch, lock: ControlLock) -> Guest:
    """Boot the kernel to its first system call, and set the limit `scratch_bytes` of its scratch files."""
    guest = boot_guest(BuiltinKernel(machine, image), watch, TaskEvents(), lock)
    scratch_bytes = machine.config.limits[Limit.SCRATCH_BYTES]
    if scratch_bytes is not None:
        guest.kernel.limit_file_pages(scratch_bytes // PAGE_SIZE)
    return guest


def _probed_kernel(
    machine: Machine,
    live: LiveImage[KernelImage],
    arch: Arch,
    guest: Guest,
    clock: RequestClock,
    lock: ControlLock,
    profile: Profile,
) -> ProbedKernel:
    """Collect the parts of the booted kernel that are the input of build_probe_engine()."""
    return ProbedKernel(
        machine=machine,
        tables=live,
        image=live.core,
        abi=live.core.abi,
        arch=arch,
        grace_period=GracePeriod(
            guest.kernel, clock.jiffies, lambda: guest.call_function("yield"), guest.frozen
        ),
        log=guest.log,
        lock=lock,
        profile=profile,
        cpus=machine.config.cpus,
        return_hook=machine.config.return_hook,
    )


def _traced_kernel(
    machine: Machine,
    live: LiveImage[KernelImage],
    arch: Arch,
    guest: Guest,
    engine: ProbeRegistries,
) -> TracedKernel:
    """Return the input of build_trace(): the booted kernel, and further objects that tracing needs."""
    kprobes = engine.kprobes
    image = live.core
    memory = machine.memory
    tasks = Tasks(machine, image.abi)
    context = PerCpuContext(
        kprobes.hits.ctlblk,
        memory,
        image.abi,
        arch.interrupt_flag,
        machine.per_cpu_bases,
        preemption=kprobes.profile.preemption,
    )
    machine.on_switch.append(context.switch_to)
    keys = StaticKeys(image.jump_labels, machine, kprobes.poker, arch)
    hit = ProbeHit(memory, tasks, context.trace_ctx)
    interface = interface_named(kprobes.profile.interface)
    user_data = UserDataSize() if InterfaceRule.SYSCALL_USER_DATA in interface else None
    signed_char = InterfaceRule.CHAR_UNSIGNED not in interface
    arguments = arch.registers.arguments
    points = Tracepoints(
        image, memory, machine.breakpoints, keys, hit, arguments, user_data, signed_char=signed_char
    )
    return TracedKernel(
        machine=machine,
        live=live,
        abi=image.abi,
        symbols=KernelSymbols(live.kallsyms, engine.hook_sets, kprobes.sites, lambda: machine.text.generated),
        tasks=tasks,
        context=context,
        events=sorted(points.events(), key=lambda event: link_rank(event.group, event.name)),
        points=points.by_name,
        syscall_name={call.nr: call.name for call in points.syscalls}.get,
        fentry=image.mcount,
        resched=NeedResched(),
        limits=machine.config.limits,
        log=guest.log,
        measured=machine,
        user_data=user_data,
        types=cache(partial(load_types, image.path)),
    )


def _show_event_directories(machine: Machine, guest: Guest, tracing: TracingComponents) -> None:
    """From now on, make the guest create directories for new groups and events, and later remove them.

    The guest calls the kernel's functions for this, so probes on these functions are hit. It calls them only
    while its text is patched, because otherwise no probe can notice the call.
    """
    is_patched = partial(bool, machine.text.ledger.words)
    GuestDirectories(tracing.system.events, guest.call_function, is_patched, lambda: machine.is_running)


def _build_modules(
    machine: Machine,
    arch: Arch,
    live: LiveImage[KernelImage],
    guest: Guest,
    engine: ProbeRegistries,
    tracing: TracingComponents,
) -> Modules:
    """Build the loader of modules, and allow the guest's modules to register probes by a hypercall."""
    probes = GuestProbes(
        engine.kprobes, engine.kretprobes, engine.jprobes, machine, arch, guest.runner.note, guest.log
    )
    guest.runner.services[Hypercall.KPROBES] = probes.serve
    notifier = ModuleNotifier(
        guest.kernel.read_module,
        guest.kernel.module_name,
        live,
        engine.kprobes,
        tracing.symbols,
        tracing.functions,
        tracing.arrays,
        tracing.kprobe_events,
        probes.forget_within,
    )
    return Modules(guest, notifier)
