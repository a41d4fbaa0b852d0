"""Puts the parts of a kernel together, in the order in which one needs the other."""

from __future__ import annotations

import errno
from dataclasses import replace
from functools import partial

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.architectures import arch_named
from emulated_kernel.components.clock_switch import ClockSwitch
from emulated_kernel.components.components import ProbeRegistries, TracingComponents
from emulated_kernel.components.guest_directories import GuestDirectories
from emulated_kernel.components.module_notifier import ModuleNotifier
from emulated_kernel.components.tracing import TracedKernel, build_trace
from emulated_kernel.guests.builtin.builtin_kernel import BuiltinKernel
from emulated_kernel.guests.builtin.guest import Guest, boot_guest
from emulated_kernel.guests.builtin.kernel_components import BuiltinKernelComponents
from emulated_kernel.guests.builtin.modules import Modules
from emulated_kernel.guests.builtin.workloads.workloads import Workloads
from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.common.request_clock import RequestClock, RequestObserver
from emulated_kernel.image.builtin_image import KernelImage, load_image
from emulated_kernel.image.live_image import LiveImage
from emulated_kernel.kprobes.kinds.fprobe import Fprobes
from emulated_kernel.kprobes.kinds.guest_probes import GuestProbes
from emulated_kernel.kprobes.kinds.jprobe import Jprobes
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobes
from emulated_kernel.kprobes.profile import Profile, RegisterSaving, profile_named
from emulated_kernel.kprobes.quiescence import GracePeriod
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.kprobes.return_hook.hook_sets import HookSets, never_returning
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.task_events import TaskEvents
from emulated_kernel.machine.traps.trap import GuestFault, HardwareError, MemoryFault
from emulated_kernel.trace.compiled.guest_addresses import NeedResched
from emulated_kernel.trace.context.probe_hit import ProbeHit, Tasks
from emulated_kernel.trace.context.trace_ctx import HitContext
from emulated_kernel.trace.events.link_order import link_rank
from emulated_kernel.trace.events.static_keys import StaticKeys
from emulated_kernel.trace.events.tracepoints import Tracepoints
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.trace.tracers.fgraph import traceable_functions
from emulated_kernel.util.abi import PAGE_SIZE, Hypercall
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.limits import Limit


def build(
    config: MachineConfig,
    watch: ProcessWatch,
    profile: Profile | None = None,
    lock: ControlLock | None = None,
) -> BuiltinKernelComponents:
    """A kernel booted to its first system call, with the engine and tracing around it.

    `profile` goes before the one that `config` names; `lock` is one that is held, where the kernel takes
    another one's place.
    Raises: KernelError ENOENT (no such architecture), ENOEXEC (no image, or one that doesn't boot), OSError.
    """
    profile = profile or profile_named(config.profile)
    if config.save_regs is not None:
        profile = replace(profile, saving=RegisterSaving(config.save_regs))
    live = LiveImage(load_image(config.image, config.arch))
    try:
        machine = Machine(config, live.core)
        try:
            return _on_machine(machine, live, watch, profile, lock or ControlLock())
        except BaseException:
            machine.close()
            raise
    except (GuestFault, HardwareError, MemoryFault) as error:
        # What stops a kernel on its way to its first task is the image's fault.
        raise KernelError(errno.ENOEXEC, f"{live.core.path.name} doesn't boot: {error}") from error


def _on_machine(
    machine: Machine, live: LiveImage[KernelImage], watch: ProcessWatch, profile: Profile, lock: ControlLock
) -> BuiltinKernelComponents:
    config = machine.config
    image = live.core
    arch = arch_named(config.arch)
    guest = boot_guest(BuiltinKernel(machine, image), watch, TaskEvents(), lock)
    if (most := config.limits[Limit.SCRATCH_BYTES]) is not None:
        guest.kernel.limit_file_pages(most // PAGE_SIZE)
    clock = RequestClock(machine.clock, pauses=config.pauses)
    engine = _engine(machine, live, arch, guest, clock, lock, profile)
    requests = RequestObserver(clock, engine.kprobes)
    guest.runner.events.watch(requests)
    trace = _tracing(machine, live, arch, guest, engine)
    return BuiltinKernelComponents(
        config=config,
        lock=lock,
        live=live,
        arch=arch,
        machine=machine,
        guest=guest,
        engine=engine,
        tracing=trace,
        modules=_modules(machine, arch, live, guest, engine, trace),
        requests=requests,
        clock=ClockSwitch(machine.clock, trace.arrays, lock),
        loads=Workloads(guest, lock, requests),
    )


# The engine


def _engine(
    machine: Machine,
    live: LiveImage[KernelImage],
    arch: Arch,
    guest: Guest,
    clock: RequestClock,
    lock: ControlLock,
    profile: Profile,
) -> ProbeRegistries:
    image = live.core
    scheduler = GracePeriod(guest.kernel, clock.jiffies, lambda: guest.call_function("yield"), guest.frozen)
    kprobes = Kprobes(machine, live, arch, guest.log, scheduler, lock, profile)
    machine.on_switch.append(kprobes.hits.ctlblk.switch_to)
    hook_sets = HookSets(machine, image.abi, arch, kprobes, scheduler, machine.config.return_hook)
    kretprobes = Kretprobes(
        kprobes, hook_sets.first, cpus=machine.config.cpus, blacklist=never_returning(image, arch)
    )
    cpus = machine.config.cpus
    return ProbeRegistries(
        kprobes,
        Jprobes(kprobes, machine, arch) if profile.jprobes else None,
        kretprobes,
        hook_sets,
        Fprobes(
            kprobes,
            kretprobes.hooks,
            arch,
            partial(traceable_functions, image, kprobes.probe_checker),
            cpus=cpus,
        ),
    )


# Tracing


def _tracing(
    machine: Machine,
    live: LiveImage[KernelImage],
    arch: Arch,
    guest: Guest,
    engine: ProbeRegistries,
) -> TracingComponents:
    kprobes = engine.kprobes
    image = live.core
    memory = machine.memory
    events = guest.runner.events
    tasks = Tasks(machine, image.abi)
    context = HitContext(
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
    points = Tracepoints(image, memory, machine.breakpoints, keys, hit, arch.registers.arguments)
    traced = TracedKernel(
        machine=machine,
        live=live,
        abi=image.abi,
        symbols=KernelSymbols(live.kallsyms, engine.hook_sets, kprobes.sites),
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
    )
    trace = build_trace(traced, engine, arch)
    events.watch(trace.guest_records)
    events.watch(trace.arrays)
    is_patched = partial(bool, machine.text.ledger.words)
    GuestDirectories(trace.system.events, guest.call_function, is_patched, lambda: machine.is_running)
    return trace


def _modules(
    machine: Machine,
    arch: Arch,
    live: LiveImage[KernelImage],
    guest: Guest,
    engine: ProbeRegistries,
    trace: TracingComponents,
) -> Modules:
    probes = GuestProbes(
        engine.kprobes, engine.kretprobes, engine.jprobes, machine, arch, guest.runner.note, guest.log
    )
    guest.runner.services[Hypercall.KPROBES] = probes.serve
    notifier = ModuleNotifier(
        guest.kernel.read_module,
        guest.kernel.module_name,
        live,
        engine.kprobes,
        trace.symbols,
        trace.functions,
        trace.kprobe_events,
        probes.forget_within,
    )
    return Modules(guest, notifier)
