"""Tracing over a distribution's kernel: what tracefs shows, but for what needs our own image."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial

from emulated_kernel.arch.base import Arch
from emulated_kernel.image.linux.kernel import LinuxKernel
from emulated_kernel.image.modules import LiveImage
from emulated_kernel.image.tables import words
from emulated_kernel.kprobes.return_hook.hook_sets import GRAPH_TRAMPOLINE
from emulated_kernel.limits import Limits
from emulated_kernel.linux.kernel_tracepoints import KernelTracepoints
from emulated_kernel.linux.linux_clock import LinuxClock
from emulated_kernel.linux.linux_context import LinuxContext, linux_asking
from emulated_kernel.linux.syscall_work import SyscallWork
from emulated_kernel.lock import ControlLock
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.parts import ProbeRegistries, TraceParts
from emulated_kernel.trace.array.system import TraceSystem
from emulated_kernel.trace.compiled.guest_records import GuestRecords
from emulated_kernel.trace.events.own_entries import own_events
from emulated_kernel.trace.events.print_event import PrintEvent
from emulated_kernel.trace.events.registry import EventRegistry
from emulated_kernel.trace.hist.system import HistSystem
from emulated_kernel.trace.hist.trigger import HistCommand
from emulated_kernel.trace.hits.call_stack import CallStack
from emulated_kernel.trace.hits.function_frames import FrameTables
from emulated_kernel.trace.hits.probe_hit import ProbeHit, Tasks
from emulated_kernel.trace.probes.dynamic_events import DynamicEvents, EventCommands
from emulated_kernel.trace.probes.eprobe import EventProbes
from emulated_kernel.trace.probes.kprobe_events import KprobeEvents
from emulated_kernel.trace.probes.trace_kprobe import ProbeEngine
from emulated_kernel.trace.probes.uprobe_events import UprobeEvents
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.trace.synth.events import SyntheticEvents
from emulated_kernel.trace.text.cmdlines import SavedCmdlines
from emulated_kernel.trace.trace_arrays import TraceArrays
from emulated_kernel.trace.tracers.call_sites import KernelFunctions
from emulated_kernel.trace.tracers.graphs import build_graphs
from emulated_kernel.trace.tracers.stack_tracer import StackTracer


def linux_tracing(
    machine: ProbedMachine,
    live: LiveImage[LinuxKernel],
    arch: Arch,
    engine: ProbeRegistries,
    abi: Mapping[str, int],
    lock: ControlLock,
    printk: Callable[[str], None],
    task_structs: Callable[[], Iterator[int]],
    call: Callable[[int], int] | None,
) -> tuple[TraceParts, KernelTracepoints]:
    """With its tracepoints.

    `live`: with its text as it runs; `printk`: a line of its log; `call`: see KernelTracepoints.
    """
    kernel, kprobes, memory, limits = live.core, engine.kprobes, machine.memory, Limits()
    registry, cmdlines = EventRegistry(), SavedCmdlines()
    symbols = KernelSymbols(kernel.kallsyms, engine.hook_sets, kprobes.sites)
    tasks = Tasks(machine, abi)
    context = LinuxContext(kprobes.hits.ctlblk, machine, abi, arch, preemption=kprobes.profile.preemption)
    records = GuestRecords(machine.records, tasks, cmdlines, machine.clock)
    here = ProbeHit(memory, tasks, context.trace_ctx)
    here.regs = machine.regs
    markers = PrintEvent(arch.word_size)
    for own in (markers, *own_events(arch.word_size)):
        registry.add_own(own)
    points = KernelTracepoints(
        machine,
        kernel,
        arch,
        kprobes.poker,
        ProbeHit(memory, tasks, context.trace_ctx),
        SyscallWork(kernel, memory, task_structs),
        call,
    )
    for event in points.events():
        registry.add(event)
    tables = FrameTables(machine.text, live, symbols, arch, engine.hook_sets)
    system = TraceSystem(
        cpus=len(machine.per_cpu_bases),
        now_ns=machine.clock.read_ns,
        events=registry,
        symbols=symbols,
        arch=arch,
        tasks=tasks,
        stack=CallStack(memory, tables, abi, symbols, arch, engine.hook_sets, kprobes),
        here=here,
        memory=records,
        markers=markers,
        cmdlines=cmdlines,
        printk=printk,
        release=kernel.release,
    )
    # Those of functions that ran at boot are gone.
    sites = kernel.mcount.between(*kernel.text)
    functions = KernelFunctions(
        kprobes.sites,
        sites,
        symbols,
        ProbeHit(memory, tasks, context.trace_ctx),
        kprobes.verdict,
        arch,
    )
    hists = HistCommand(HistSystem(registry, lambda number: _syscall_names(kernel).get(number)))
    arrays = TraceArrays(system, hists, functions, machine.clock.now_ns, lock, limits)
    commands = EventCommands(registry, arrays.top.errors, printk, limits)
    hit = ProbeHit(memory, tasks, context.hit_trace_ctx)
    places = records.places(
        abi,
        arch.interrupt_flag,
        context.breakpoint_trace_ctx,
        lambda: LinuxClock.step_ns,
        linux_asking(kernel),
    )
    graph = profiler = None
    if kernel.kallsyms.lookup_name(GRAPH_TRAMPOLINE) is not None:
        # Where functions aren't to be followed that return to another task, they aren't traced at all.
        graph, profiler = build_graphs(
            kprobes,
            engine.hook_sets,
            arrays.top.array,
            arrays.top.functions,
            functions.functions,
            points.by_name,
            context,
            places,
        )
    probes = ProbeEngine(arch, symbols, kprobes, engine.kretprobes, engine.fprobes, hit, places)
    kprobe_events = KprobeEvents(probes, commands)
    synthetic_events = SyntheticEvents(commands, arch.word_size)
    uprobe_events = UprobeEvents(arch, commands)
    parts = TraceParts(
        symbols=symbols,
        system=system,
        arrays=arrays,
        functions=functions,
        function_graph=graph,
        function_profiler=profiler,
        stack_tracer=StackTracer(functions, system, memory, abi),
        printk_formats=partial(printk_formats, kernel),
        guest_records=records,
        handler_costs=None,
        dynamic_events=DynamicEvents(
            commands, kprobe_events, synthetic_events, uprobe_events, EventProbes(arch, symbols, commands)
        ),
        kprobe_events=kprobe_events,
        fprobe_events=None,
        synthetic_events=synthetic_events,
        uprobe_events=uprobe_events,
    )
    return parts, points


_FORMATS = ("trace_bprintk_fmt", "tracepoint_str")
_SHOWN = str.maketrans({"\n": "\\n", "\t": "\\t", '"': '\\"'})


def printk_formats(kernel: LinuxKernel) -> Iterator[str]:
    """Of its own trace_printk() and the strings that its records point to.

    Mirrors: kernel/trace/trace_printk.c:find_next, t_show (v6.1)
    """
    for place in _FORMATS:
        start, end = kernel.between(f"__start___{place}", f"__stop___{place}")
        for at in words(kernel.read(start, end - start)):
            if at:
                yield f'{at:#x} : "{kernel.vmlinux.string(at).translate(_SHOWN)}"\n'


@cache
def _syscall_names(kernel: LinuxKernel) -> Mapping[int, str]:
    return {call.nr: call.name for call in kernel.syscalls}
