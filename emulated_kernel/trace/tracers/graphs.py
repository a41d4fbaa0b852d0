"""build_graphs(): builds the function_graph tracer and the function profiler on one FunctionGraph."""

from __future__ import annotations

from collections.abc import Mapping

from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.kprobes.return_hook.hook_sets import HookSets
from emulated_kernel.trace.array.trace_array import TraceArray
from emulated_kernel.trace.compiled.guest_addresses import GuestAddresses
from emulated_kernel.trace.context.trace_ctx import HitContext
from emulated_kernel.trace.events.static_event import Tracepoint
from emulated_kernel.trace.tracers.available_functions import Functions
from emulated_kernel.trace.tracers.fgraph import FunctionGraph
from emulated_kernel.trace.tracers.function_profiler import FunctionProfiler
from emulated_kernel.trace.tracers.function_tracer import FunctionTracer
from emulated_kernel.trace.tracers.graph_tracer import GraphTracer
from emulated_kernel.trace.tracers.sleep_times import SleepTimes


def build_graphs(
    kprobes: Kprobes,
    hook_sets: HookSets,
    array: TraceArray,
    tracer: FunctionTracer,
    functions: Functions,
    points: Mapping[str, Tracepoint],
    context: HitContext,
    places: GuestAddresses,
) -> tuple[GraphTracer, FunctionProfiler]:
    """Build the function_graph tracer and the function profiler of the top array, `array`.

    Register the function_graph tracer with `array`, so that current_tracer can select it. `tracer` is the
    array's function tracer. `points` maps GROUP:EVENT -> tracepoint of the kernel.
    """
    system = array.system
    graph = FunctionGraph(kprobes, hook_sets.graph, system, tracer, SleepTimes(points, system), places)
    graph_tracer = GraphTracer(graph, functions, array, tracer.pids, context)
    array.register_tracer("function_graph", graph_tracer)
    return graph_tracer, FunctionProfiler(graph, system, lambda: graph_tracer.threshold_ns)
