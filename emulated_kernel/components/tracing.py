"""Build tracing over any kernel: events, trace arrays, tracers, and the registries of dynamic events."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.program.cpu_words import CpuWords
from emulated_kernel.components.records import ProbeRegistries, TracingComponents
from emulated_kernel.image.live_image import LiveImage
from emulated_kernel.kprobes.kinds.fprobe import Fprobes
from emulated_kernel.kprobes.profile import TrampolineForm
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.trace.array.services import TracingServices
from emulated_kernel.trace.compiled.guest_addresses import GuestAddresses, NeedResched
from emulated_kernel.trace.compiled.guest_records import GuestRecords
from emulated_kernel.trace.compiled.next_page import compile_next_page
from emulated_kernel.trace.context.call_stack import CallStack
from emulated_kernel.trace.context.function_frames import FrameTables
from emulated_kernel.trace.context.probe_hit import ProbeHit, Tasks
from emulated_kernel.trace.context.trace_ctx import HitContext
from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.events.ftrace_entries import ftrace_entry_events
from emulated_kernel.trace.events.print_event import PrintEvent
from emulated_kernel.trace.events.registry import EventRegistry
from emulated_kernel.trace.events.static_event import Tracepoint
from emulated_kernel.trace.events.syscall_user_data import UserDataSize
from emulated_kernel.trace.fetch.fetch_context import no_types
from emulated_kernel.trace.filter.words import FilterWords
from emulated_kernel.trace.hist.services import HistServices
from emulated_kernel.trace.hist.trigger import HistCommand
from emulated_kernel.trace.interface import Interface, InterfaceRule, interface_named
from emulated_kernel.trace.output.function_args import COUNT, FunctionArgs
from emulated_kernel.trace.output.tracer_options import TracerOptions
from emulated_kernel.trace.probes.dynamic_events import DynamicEvents, EventCommands, EventKind
from emulated_kernel.trace.probes.eprobe import EventProbes
from emulated_kernel.trace.probes.fprobe_events import FprobeEvents
from emulated_kernel.trace.probes.handler_cost import HandlerCosts
from emulated_kernel.trace.probes.kprobe_events import KprobeEvents
from emulated_kernel.trace.probes.trace_kprobe import ProbeEngine
from emulated_kernel.trace.probes.uprobe_events import UprobeEvents
from emulated_kernel.trace.ring.trace_clock import ClockSource
from emulated_kernel.trace.ring.trace_entry import MARKER_SYMBOL
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.trace.synth.synthetic_events import SyntheticEvents
from emulated_kernel.trace.text.cmdlines import SavedCmdlines
from emulated_kernel.trace.trace_arrays import TraceArrays
from emulated_kernel.trace.tracers.available_functions import FunctionWatcher
from emulated_kernel.trace.tracers.call_sites import KernelFunctions
from emulated_kernel.trace.tracers.function_profiler import FunctionProfiler
from emulated_kernel.trace.tracers.graph_tracer import GraphTracer
from emulated_kernel.trace.tracers.graphs import build_graphs
from emulated_kernel.trace.tracers.stack_tracer import StackTracer
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.limits import Limit, Limits, MemoryBudget

TYPE_CHECKING = False
if TYPE_CHECKING:
    from emulated_kernel.image.linux.btf import Btf
    from emulated_kernel.machine.machine import Machine


@dataclass(frozen=True, eq=False)
class TracedKernel:
    """The input of build_trace(): a booted kernel with its tracepoints.

    The kernel is kprobefs's own or a distribution's.
    """

    machine: ProbedMachine
    live: LiveImage[Any]
    """Text and tables of the kernel and its loaded modules."""
    abi: Mapping[str, int]
    """Name, such as `task_struct.comm`, -> offset in bytes in a structure or per-CPU area.

    The names are those in the ABI table of kprobefs's own image.
    """
    symbols: KernelSymbols
    tasks: Tasks
    context: HitContext
    events: Iterable[TraceEvent]
    """The kernel's static events, in the order in which tracefs lists them."""
    points: Mapping[str, Tracepoint]
    """GROUP:EVENT -> tracepoint.

    The map is complete only after all items of `events` have been iterated over.
    """
    syscall_name: Callable[[int], str | None]
    """Function that maps a system call's number to its name, or to None if no system call has the number."""
    fentry: Collection[int]
    """Addresses of the fentry sites, at which functions can be traced."""
    resched: NeedResched
    limits: Limits
    log: Callable[[str], None]
    """Function that writes a line to the kernel log."""
    release: str = ""
    """Release of the kernel, as uname -r prints it; "" selects the release that `interface` names."""
    types: Callable[[], Btf | None] = no_types
    """Function that returns the kernel's BTF, or None if the kernel has no BTF."""
    interface: Interface | None = None
    """The version of tracefs that the kernel shows; None selects the profile's version."""
    printk_formats: Callable[[], Iterable[str]] = tuple
    """Function that returns the lines of the file printk_formats."""
    has_graph: bool = True
    """Whether calls can be followed to their returns, for function_graph and the profiler."""
    other_tracers: Mapping[str, Mapping[str, bool]] | None = None
    """Tracers that the kernel has, but that kprobefs does not run.

    Name of the tracer -> name of an option of the tracer -> whether the option is on. None: there are no such
    tracers.
    """
    marker_ip: int | None = None
    """Address that trace_marker's records contain as ip; None selects the start of MARKER_SYMBOL."""
    user_data: UserDataSize | None = None
    """How much user memory the record of a system call may contain for each pointer argument.

    None: the records contain no user memory.
    """
    measured: Machine | None = None
    """The machine for measuring the cost of events' handlers; None if costs cannot be measured."""


def build_trace(kernel: TracedKernel, engine: ProbeRegistries, arch: Arch) -> TracingComponents:
    """Build tracing, with nothing enabled, over a kernel whose probes are registered with `engine`."""
    interface = kernel.interface or interface_named(engine.kprobes.profile.interface)
    registry = EventRegistry()
    cmdlines = SavedCmdlines()
    lock = engine.kprobes.lock
    records = GuestRecords(
        kernel.machine.records,
        kernel.tasks,
        cmdlines,
        kernel.machine.clock,
        kernel.machine.damage,
        MemoryBudget(kernel.limits, None, Limit.USER_RECORD_BYTES, lambda: lock.user),
        partial(compile_next_page, engine.kprobes.compiler, arch.word_size),
    )
    # This must come before any lookup of tracepoints: iterating the events creates them.
    markers = _register_static_events(registry, kernel, arch, interface)
    system = _build_services(kernel, engine, arch, registry, records, markers, cmdlines, interface)
    words = CpuWords.of(kernel.abi, arch.current_register, arch.word_size)
    assert words is not None, "all kernels with tracing have these words"
    addresses = records.places(
        kernel.abi,
        (*arch.interrupt_flag, arch.has_interrupt_mask),
        kernel.context.breakpoint_trace_ctx,
        kernel.resched,
        words,
    )
    functions = _build_functions(kernel, engine, arch, addresses, interface)
    arrays = _build_arrays(kernel, engine, system, functions)
    graph, profiler = _build_graphs(kernel, engine, arrays, functions, addresses)
    commands = EventCommands(
        registry, arrays.top.errors, kernel.log, kernel.limits, interface, system.filter_words
    )
    probes = _build_probes(kernel, engine, arch, addresses)
    kprobe_events = KprobeEvents(probes, commands)
    engine.kprobes.after_switch.append(kprobe_events.history.note)
    fprobe_events = None
    if InterfaceRule.FPROBE_EVENTS in interface:
        called = ProbeHit(kernel.machine.memory, kernel.tasks, kernel.context.trace_ctx)
        fprobe_events = FprobeEvents(probes, commands, kernel.points, called)
    synthetic_events = SyntheticEvents(commands, arch.word_size)
    uprobe_events = UprobeEvents(arch, commands)
    # A command is offered to each kind in this order.
    kinds: tuple[EventKind[Any] | None, ...] = (
        kprobe_events,
        fprobe_events,
        synthetic_events,
        uprobe_events,
    )
    if InterfaceRule.EVENT_PROBES in interface:
        kinds += (EventProbes(arch, kernel.symbols, commands, kernel.types),)
    return TracingComponents(
        symbols=kernel.symbols,
        system=system,
        arrays=arrays,
        functions=functions,
        function_graph=graph,
        function_profiler=profiler,
        stack_tracer=StackTracer(functions, system, kernel.machine.memory, kernel.abi),
        printk_formats=kernel.printk_formats,
        guest_records=records,
        handler_costs=_build_handler_costs(kernel, engine, arch, records, addresses),
        dynamic_events=DynamicEvents(commands, *(kind for kind in kinds if kind is not None)),
        kprobe_events=kprobe_events,
        fprobe_events=fprobe_events,
        synthetic_events=synthetic_events,
        uprobe_events=uprobe_events,
    )


def _register_static_events(
    registry: EventRegistry, kernel: TracedKernel, arch: Arch, interface: Interface
) -> PrintEvent:
    """Register the kernel's static events and ftrace's entry types; return the event for trace_marker."""
    for event in kernel.events:
        registry.add(event)
    marker_ip = kernel.marker_ip or kernel.symbols.lookup_name(MARKER_SYMBOL)
    signed_char = InterfaceRule.CHAR_UNSIGNED not in interface
    markers = PrintEvent(arch.word_size, marker_ip or 0, signed_char=signed_char)
    for own in (markers, *ftrace_entry_events(arch.word_size, interface)):
        registry.add_own(own)
    return markers


def _build_services(
    kernel: TracedKernel,
    engine: ProbeRegistries,
    arch: Arch,
    registry: EventRegistry,
    records: GuestRecords,
    markers: PrintEvent,
    cmdlines: SavedCmdlines,
    interface: Interface,
) -> TracingServices:
    """Build the services that all trace arrays share."""
    machine = kernel.machine
    kprobes = engine.kprobes
    hook_sets = engine.hook_sets
    tables = FrameTables(machine.text, kernel.live, kernel.symbols, arch, hook_sets)
    args = None
    if InterfaceRule.FUNCTION_ARGS in interface and len(arch.registers.arguments) >= COUNT:
        args = FunctionArgs(kernel.symbols, kernel.types, arch.word_size)
    current_ctx = ProbeHit(machine.memory, kernel.tasks, kernel.context.trace_ctx, machine.regs)
    current_ctx.handler_preempt_count = int(InterfaceRule.MARKERS_UNPREEMPTED in interface)
    return TracingServices(
        lock=kprobes.lock,
        cpus=len(machine.per_cpu_bases),
        now_ns=machine.clock.read_ns,
        events=registry,
        symbols=kernel.symbols,
        arch=arch,
        tasks=kernel.tasks,
        stack=CallStack(machine.memory, tables, kernel.abi, kernel.symbols, arch, hook_sets, kprobes),
        current_ctx=current_ctx,
        memory=records,
        markers=markers,
        cmdlines=cmdlines,
        printk=kernel.log,
        clocks=ClockSource(machine.clock),
        marker_preempt_count=current_ctx.handler_preempt_count * kernel.context.disabled_once,
        tracer_options=TracerOptions(kernel.other_tracers, has_args=args is not None),
        function_args=args,
        interface=interface,
        filter_words=_filter_words(kernel, arch, interface, kprobes.lock),
        release=kernel.release or interface.release,
        user_data=kernel.user_data,
    )


def _filter_words(kernel: TracedKernel, arch: Arch, interface: Interface, lock: ControlLock) -> FilterWords:
    """Return what the event filters of the kernel may use.

    That is: the features of the interface, the number of CPUs, the word size, a lookup of functions, and the
    memory budget.
    """
    symbols = kernel.symbols

    def find(place: str | int) -> range | None:
        address = symbols.lookup_name(place) if isinstance(place, str) else place
        found = symbols.lookup(address) if address else None
        if found is None:
            return None
        return range(found.symbol.address, found.symbol.address + found.symbol.size)

    memory = MemoryBudget(
        kernel.limits, Limit.DEFINITION_BYTES, Limit.USER_DEFINITION_BYTES, lambda: lock.user
    )
    return FilterWords(interface, len(kernel.machine.per_cpu_bases), arch.word_size, find, memory)


def _build_functions(
    kernel: TracedKernel,
    engine: ProbeRegistries,
    arch: Arch,
    addresses: GuestAddresses,
    interface: Interface,
) -> KernelFunctions:
    """Build the list of traceable functions; tracers and fprobes use it to attach to fentry sites."""
    called = ProbeHit(kernel.machine.memory, kernel.tasks, kernel.context.trace_ctx)
    found = KernelFunctions(engine.kprobes, kernel.fentry, kernel.symbols, called, arch, addresses, interface)
    engine.fprobes.functions = found.functions
    found.functions.watch(_FprobeWatcher(engine.fprobes))
    return found


class _FprobeWatcher(FunctionWatcher):
    """Detaches fprobes from functions that are removed."""

    def __init__(self, fprobes: Fprobes) -> None:
        self._fprobes = fprobes

    def functions_removed(self, sites: frozenset[int]) -> None:
        self._fprobes.functions_removed(sites)


def _build_arrays(
    kernel: TracedKernel, engine: ProbeRegistries, system: TracingServices, functions: KernelFunctions
) -> TraceArrays:
    """Build the collection of trace arrays, with only the top trace array."""
    lock = engine.kprobes.lock
    memory = MemoryBudget(kernel.limits, Limit.HIST_BYTES, Limit.USER_HIST_BYTES, lambda: lock.user)
    hists = HistCommand(HistServices(system.events, kernel.syscall_name, memory, system.interface))
    now_ns = kernel.machine.clock.now_ns
    return TraceArrays(system, hists, functions, now_ns, lock, kernel.limits)


def _build_graphs(
    kernel: TracedKernel,
    engine: ProbeRegistries,
    arrays: TraceArrays,
    functions: KernelFunctions,
    addresses: GuestAddresses,
) -> tuple[GraphTracer | None, FunctionProfiler | None]:
    """Return (function_graph tracer, function profiler), or (None, None) if calls can't be followed."""
    if not (kernel.has_graph and functions.has_sites):
        return None, None
    top = arrays.top
    return build_graphs(
        engine.kprobes,
        engine.hook_sets,
        top.array,
        top.functions,
        functions.functions,
        kernel.points,
        kernel.context,
        addresses,
    )


def _build_probes(
    kernel: TracedKernel, engine: ProbeRegistries, arch: Arch, addresses: GuestAddresses
) -> ProbeEngine:
    """Build the ProbeEngine, with which dynamic events register their probes."""
    kprobes = engine.kprobes
    hit = ProbeHit(kernel.machine.memory, kernel.tasks, kernel.context.hit_trace_ctx)
    return ProbeEngine(
        arch,
        kernel.symbols,
        kprobes,
        engine.kretprobes,
        engine.fprobes,
        hit,
        addresses,
        kprobes.profile.jprobes,
        kprobes.why_unarmed,
        kernel.types,
        kprobes.profile.trampoline is TrampolineForm.BREAKPOINT,
        kernel.context.disabled_once,
    )


def _build_handler_costs(
    kernel: TracedKernel,
    engine: ProbeRegistries,
    arch: Arch,
    records: GuestRecords,
    addresses: GuestAddresses,
) -> HandlerCosts | None:
    """Build the measurement of handlers' costs, or return None if the kernel doesn't allow measurements."""
    if kernel.measured is None:
        return None
    return HandlerCosts(kernel.measured, arch, engine.kprobes.compiler, records, addresses)
