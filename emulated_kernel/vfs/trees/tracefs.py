"""The directory tracing/, which is tracefs, with the files that kprobefs supports."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from emulated_kernel.components.records import TracingComponents
from emulated_kernel.trace.array.services import FUNCTION_TRACER
from emulated_kernel.trace.interface import InterfaceRule
from emulated_kernel.trace.probes.dynamic_events import DynamicEvents, EventKind
from emulated_kernel.trace.probes.kprobe_events import KprobeEvents
from emulated_kernel.trace.text.printf import signed
from emulated_kernel.trace.tracers.call_sites import KernelFunctions
from emulated_kernel.trace.tracers.function_profiler import FunctionProfiler
from emulated_kernel.trace.tracers.graph_tracer import GraphTracer
from emulated_kernel.trace.tracers.stack_tracer import StackTracer
from emulated_kernel.vfs.core.attribute_file import AttributeFile, UnseekableAttribute
from emulated_kernel.vfs.core.command_file import LinesFile
from emulated_kernel.vfs.core.edited_file import EditedFile
from emulated_kernel.vfs.core.modes import DIRECTORY, READ_ONLY, READ_WRITE, ROOT
from emulated_kernel.vfs.core.node import Directory, Node
from emulated_kernel.vfs.core.open_file import File, Moves
from emulated_kernel.vfs.core.seq_file import SeqFile, listing, single
from emulated_kernel.vfs.trees.readme import readme_text
from emulated_kernel.vfs.trees.trace_array_files import (
    instances_directory,
    number_file,
    time_file,
    trace_array_files,
)


def tracefs_directory(trace: TracingComponents, further: Mapping[str, Node] | None = None) -> Directory:
    """Return the top directory of tracefs, which only its owner can access.

    `further`: name -> node of additional entries; None: there are none.
    """
    return Directory(ROOT, {**trace_array_files(trace.arrays.top), **_top_files(trace), **(further or {})})


def _top_files(trace: TracingComponents) -> dict[str, Node]:
    arrays = trace.arrays
    uprobe_events = trace.uprobe_events
    events = arrays.top.events
    system = arrays.top.array.system
    cmdlines = system.cmdlines
    has_functions = FUNCTION_TRACER in arrays.top.array.tracers()
    return {
        "README": AttributeFile(
            READ_ONLY, show=lambda: readme_text(system.interface, has_functions=has_functions)
        ),
        "available_events": SeqFile(
            READ_ONLY, listing(lambda: (f"{event.group}:{event.name}\n" for event in events.switchable()))
        ),
        "dynamic_events": _definitions_file(trace.dynamic_events),
        "instances": instances_directory(arrays),
        "kprobe_events": kprobe_events_file(trace.kprobe_events),
        "kprobe_profile": kprobe_profile_file(trace.kprobe_events),
        "printk_formats": SeqFile(READ_ONLY, listing(trace.printk_formats)),
        "saved_cmdlines": SeqFile(READ_ONLY, listing(cmdlines.records)),
        "saved_cmdlines_size": number_file(lambda: cmdlines.size, cmdlines.resize, kind=UnseekableAttribute),
        "saved_tgids": SeqFile(READ_ONLY, listing(cmdlines.tgid_records)),
        "synthetic_events": _definitions_file(trace.synthetic_events),
        "uprobe_events": _definitions_file(uprobe_events),
        "uprobe_profile": SeqFile(READ_ONLY, listing(uprobe_events.profile_records)),
        **({} if trace.function_graph is None else _graph_files(trace.function_graph)),
        **_profile_files(trace.function_profiler, arrays.top.array.cpus),
        **(_function_files(trace) if has_functions else {}),
    }


def _function_files(trace: TracingComponents) -> dict[str, Node]:
    """Return the files about functions with fentry sites and the files of the stack tracer: name -> file."""
    functions = trace.functions
    interface = trace.arrays.top.array.system.interface
    return {
        "available_filter_functions": SeqFile(READ_ONLY, functions.available),
        "enabled_functions": SeqFile(READ_ONLY, listing(functions.enabled)),
        "dyn_ftrace_total_info": AttributeFile(READ_ONLY, show=functions.total_info),
        **_stack_files(trace.stack_tracer),
        **(_later_function_files(functions) if InterfaceRule.FUNCTION_FILES in interface else {}),
    }


def _later_function_files(functions: KernelFunctions) -> dict[str, Node]:
    return {
        "available_filter_functions_addrs": SeqFile(READ_ONLY, listing(functions.addresses)),
        "touched_functions": SeqFile(READ_ONLY, listing(functions.touched)),
    }


def _graph_files(graph: GraphTracer) -> dict[str, Node]:
    return {
        "max_graph_depth": number_file(lambda: signed(graph.max_depth, 32), graph.set_max_depth),
        "tracing_thresh": time_file(lambda: graph.threshold_ns, graph.set_threshold),
        "set_graph_function": EditedFile(READ_WRITE, graph.functions),
        "set_graph_notrace": EditedFile(READ_WRITE, graph.notrace),
    }


def _profile_files(profiler: FunctionProfiler | None, cpus: int) -> dict[str, Node]:
    if profiler is None:
        return {}
    return {
        "function_profile_enabled": number_file(lambda: profiler.is_enabled, profiler.enable),
        "trace_stat": Directory(
            DIRECTORY,
            {
                f"function{cpu}": SeqFile(READ_WRITE, single(partial(profiler.text, cpu)))
                for cpu in range(cpus)
            },
        ),
    }


def _stack_files(stack: StackTracer) -> dict[str, Node]:
    return {
        "stack_max_size": number_file(lambda: stack.max_size, stack.set_max_size, Moves.NOT),
        "stack_trace": SeqFile(READ_ONLY, listing(stack.records)),
        "stack_trace_filter": EditedFile(READ_WRITE, stack.filter),
    }


def _definitions_file(events: EventKind[Any] | DynamicEvents) -> File:
    """Return a file of event definitions. A write adds or removes definitions, and O_TRUNC removes all."""
    records = events.records_from if isinstance(events, DynamicEvents) else events.records
    return LinesFile(READ_WRITE, records, events.write, events.clear)


def kprobe_events_file(events: KprobeEvents) -> File:
    """Return kprobe_events, the file of kprobe event definitions."""
    return _definitions_file(events)


def kprobe_profile_file(events: KprobeEvents) -> File:
    """Return kprobe_profile, which shows hits and misses of each kprobe event."""
    return SeqFile(READ_ONLY, events.profile_records)
