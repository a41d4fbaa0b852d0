"""Classes that hold the components of a probed kernel; the file trees are built from them.

The kernel is kprobefs's own or a distribution's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.kprobes.kinds.fprobe import Fprobes
from emulated_kernel.kprobes.kinds.jprobe import Jprobes
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobes
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.kprobes.return_hook.hook_sets import HookSets
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.trace.array.services import TracingServices
from emulated_kernel.trace.compiled.guest_records import GuestRecords
from emulated_kernel.trace.probes.dynamic_events import DynamicEvents
from emulated_kernel.trace.probes.fprobe_events import FprobeEvents
from emulated_kernel.trace.probes.handler_cost import HandlerCosts
from emulated_kernel.trace.probes.kprobe_events import KprobeEvents
from emulated_kernel.trace.probes.uprobe_events import UprobeEvents
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.trace.synth.synthetic_events import SyntheticEvents
from emulated_kernel.trace.trace_arrays import TraceArrays
from emulated_kernel.trace.tracers.call_sites import KernelFunctions
from emulated_kernel.trace.tracers.function_profiler import FunctionProfiler
from emulated_kernel.trace.tracers.graph_tracer import GraphTracer
from emulated_kernel.trace.tracers.stack_tracer import StackTracer
from emulated_kernel.util.fast_dataclass import dataclass


@dataclass(frozen=True, eq=False)
class ProbeRegistries:
    """The registries of all kinds of probes."""

    kprobes: Kprobes
    jprobes: Jprobes | None
    """The registry of jprobes, or None if the profile's kernel has no jprobes."""
    kretprobes: Kretprobes
    hook_sets: HookSets
    """The return hooks of kretprobes, fprobes and the function graph."""
    fprobes: Fprobes


@dataclass(frozen=True, eq=False)
class TracingComponents:
    """The components of tracing, from which the tracefs tree is built."""

    symbols: KernelSymbols
    system: TracingServices
    arrays: TraceArrays
    functions: KernelFunctions
    function_graph: GraphTracer | None
    function_profiler: FunctionProfiler | None
    """The function profiler, or None (like function_graph) if calls cannot be followed to their returns."""
    stack_tracer: StackTracer
    printk_formats: Callable[[], Iterable[str]]
    """Function that returns the lines of the file printk_formats."""
    guest_records: GuestRecords
    handler_costs: HandlerCosts | None
    """Measures the cost of events' handlers; None if the kernel is not kprobefs's own."""
    dynamic_events: DynamicEvents
    kprobe_events: KprobeEvents
    fprobe_events: FprobeEvents | None
    """The registry of fprobe events, or None if the kernel's version of tracefs has no fprobe events."""
    synthetic_events: SyntheticEvents
    uprobe_events: UprobeEvents


@dataclass(frozen=True, eq=False)
class KernelComponents:
    """The components that every probed kernel has: machine, probe engine and tracing."""

    arch: Arch
    machine: ProbedMachine
    engine: ProbeRegistries
    tracing: TracingComponents
