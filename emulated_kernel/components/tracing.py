"""Puts tracing together over any kernel that is probed, in the order in which one part needs the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.components.records import ProbeRegistries, TracingComponents
from emulated_kernel.image.live_image import LiveImage
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.trace.array.services import RELEASE, TracingServices
from emulated_kernel.trace.compiled.guest_addresses import NeedResched
from emulated_kernel.trace.compiled.guest_records import GuestRecords
from emulated_kernel.trace.context.call_stack import CallStack
from emulated_kernel.trace.context.function_frames import FrameTables
from emulated_kernel.trace.context.probe_hit import ProbeHit, Tasks
from emulated_kernel.trace.context.trace_ctx import HitContext
from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.events.ftrace_entries import ftrace_entry_events
from emulated_kernel.trace.events.print_event import PrintEvent
from emulated_kernel.trace.events.registry import EventRegistry
from emulated_kernel.trace.events.static_event import Tracepoint
from emulated_kernel.trace.hist.services import HistServices
from emulated_kernel.trace.hist.trigger import HistCommand
from emulated_kernel.trace.probes.dynamic_events import DynamicEvents, EventCommands
from emulated_kernel.trace.probes.eprobe import EventProbes
from emulated_kernel.trace.probes.fprobe_events import FprobeEvents
from emulated_kernel.trace.probes.handler_cost import HandlerCosts
from emulated_kernel.trace.probes.kprobe_events import KprobeEvents
from emulated_kernel.trace.probes.trace_kprobe import ProbeEngine
from emulated_kernel.trace.probes.uprobe_events import UprobeEvents
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.trace.synth.synthetic_events import SyntheticEvents
from emulated_kernel.trace.text.cmdlines import SavedCmdlines
from emulated_kernel.trace.trace_arrays import TraceArrays
from emulated_kernel.trace.tracers.call_sites import KernelFunctions
from emulated_kernel.trace.tracers.graphs import build_graphs
from emulated_kernel.trace.tracers.stack_tracer import StackTracer
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.limits import Limits


@dataclass(frozen=True, eq=False)
class TracedKernel:
    """What tracing asks of a kernel, whoever made it."""

    machine: ProbedMachine
    live: LiveImage[Any]
    """Its text and tables, with those of its modules."""
    abi: Mapping[str, int]
    """Offsets in its structures and per-CPU areas, by the names of our own image's table."""
    symbols: KernelSymbols
    tasks: Tasks
    context: HitContext
    events: Iterable[TraceEvent]
    """Its own, in the order of their files."""
    points: Mapping[str, Tracepoint]
    """Of these events, by GROUP:EVENT; complete when all of them have been made."""
    syscall_name: Callable[[int], str | None]
    fentry: Collection[int]
    """Addresses at which its functions can be traced."""
    resched: NeedResched
    limits: Limits
    log: Callable[[str], None]
    """A line of its log."""
    release: str = RELEASE
    printk_formats: Callable[[], Iterable[str]] = tuple
    """Lines of that file: nothing where none of its own records is formatted as it is shown."""
    has_graph: bool = True
    measured: Machine | None = None
    """The machine where a handler can be run beside the kernel, to see what it costs."""


def build_trace(kernel: TracedKernel, engine: ProbeRegistries, arch: Arch) -> TracingComponents:
    """Tracing with nothing on, over a kernel whose probes are registered with `engine`."""
    machine = kernel.machine
    abi = kernel.abi
    symbols = kernel.symbols
    memory = machine.memory
    tasks = kernel.tasks
    context = kernel.context
    kprobes = engine.kprobes
    hook_sets = engine.hook_sets
    registry = EventRegistry()
    cmdlines = SavedCmdlines()
    records = GuestRecords(machine.records, tasks, cmdlines, machine.clock)
    for event in kernel.events:
        registry.add(event)
    here = ProbeHit(memory, tasks, context.trace_ctx, machine.regs)
    markers = PrintEvent(arch.word_size)
    for own in (markers, *ftrace_entry_events(arch.word_size)):
        registry.add_own(own)
    tables = FrameTables(machine.text, kernel.live, symbols, arch, hook_sets)
    system = TracingServices(
        lock=kprobes.lock,
        cpus=len(machine.per_cpu_bases),
        now_ns=machine.clock.read_ns,
        events=registry,
        symbols=symbols,
        arch=arch,
        tasks=tasks,
        stack=CallStack(memory, tables, abi, symbols, arch, hook_sets, kprobes),
        current_ctx=here,
        memory=records,
        markers=markers,
        cmdlines=cmdlines,
        printk=kernel.log,
        release=kernel.release,
    )
    called = ProbeHit(memory, tasks, context.trace_ctx)
    functions = KernelFunctions(kprobes.sites, kernel.fentry, symbols, called, kprobes.probe_checker, arch)
    hists = HistCommand(HistServices(registry, kernel.syscall_name))
    arrays = TraceArrays(system, hists, functions, machine.clock.now_ns, kprobes.lock, kernel.limits)
    places = records.places(abi, arch.interrupt_flag, context.breakpoint_trace_ctx, kernel.resched)
    top = arrays.top
    graph = None
    profiler = None
    if kernel.has_graph:
        graph, profiler = build_graphs(
            kprobes, hook_sets, top.array, top.functions, functions.functions, kernel.points, context, places
        )
    commands = EventCommands(registry, top.errors, kernel.log, kernel.limits)
    hit = ProbeHit(memory, tasks, context.hit_trace_ctx)
    probes = ProbeEngine(
        arch, symbols, kprobes, engine.kretprobes, engine.fprobes, hit, places, kprobes.profile.jprobes
    )
    kprobe_events = KprobeEvents(probes, commands)
    fprobe_events = FprobeEvents(probes, commands) if kprobes.profile.fprobe_events else None
    synthetic_events = SyntheticEvents(commands, arch.word_size)
    uprobe_events = UprobeEvents(arch, commands)
    costs = None
    if kernel.measured is not None:
        costs = HandlerCosts(kernel.measured, arch, kprobes.compiler, records, places)
    return TracingComponents(
        symbols=symbols,
        system=system,
        arrays=arrays,
        functions=functions,
        function_graph=graph,
        function_profiler=profiler,
        stack_tracer=StackTracer(functions, system, memory, abi),
        printk_formats=kernel.printk_formats,
        guest_records=records,
        handler_costs=costs,
        dynamic_events=DynamicEvents(
            commands,
            kprobe_events,
            *((fprobe_events,) if fprobe_events else ()),
            synthetic_events,
            uprobe_events,
            EventProbes(arch, symbols, commands),
        ),
        kprobe_events=kprobe_events,
        fprobe_events=fprobe_events,
        synthetic_events=synthetic_events,
        uprobe_events=uprobe_events,
    )
