"""tracefs, as far as this kernel has it: a file stands here when all of it works."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from emulated_kernel.vfs.instances import instances_directory
from emulated_kernel.vfs.modes import READ_ONLY, READ_WRITE, ROOT
from emulated_kernel.vfs.node import Directory, File, Node
from emulated_kernel.vfs.parse import kstrtoul
from emulated_kernel.vfs.ports import GraphPort, KprobeEventsPort, ListPort, ProfiledPort, StackTracerPort
from emulated_kernel.vfs.readme import readme
from emulated_kernel.vfs.seq import AttributeFile, CommandFile, GuestLinesFile, SeqFile, listing
from emulated_kernel.vfs.trace_array_files import trace_array_files
from emulated_kernel.vfs.trace_ports import CmdlinesPort, FunctionsPort, InstancePort, InstancesPort

_ULONG_MAX = (1 << 64) - 1


@dataclass(frozen=True)
class TracefsPorts:
    """The parts of the kernel that tracefs is a view of."""

    functions: FunctionsPort
    top: InstancePort
    instances: InstancesPort
    cmdlines: CmdlinesPort
    kprobe_events: KprobeEventsPort
    dynamic_events: ListPort
    synthetic_events: ListPort
    uprobe_events: ProfiledPort
    graph: GraphPort | None = None
    stack: StackTracerPort | None = None
    return_probes: bool = False
    """Whether kprobe_events takes `r`; README says so."""


def tracefs_directory(ports: TracefsPorts) -> Directory:
    """The whole of tracefs; its root is for its owner alone."""
    return Directory(ROOT, {**trace_array_files(ports.top), **_top_files(ports)})


def _top_files(ports: TracefsPorts) -> dict[str, Node]:
    cmdlines = ports.cmdlines
    return {
        "README": AttributeFile(READ_ONLY, show=lambda: readme(ports.return_probes)),
        "available_events": SeqFile(READ_ONLY, listing(ports.top.events.newest_first)),
        "available_filter_functions": SeqFile(READ_ONLY, listing(ports.functions.available)),
        "enabled_functions": SeqFile(READ_ONLY, listing(ports.functions.enabled)),
        "dynamic_events": definitions_file(ports.dynamic_events),
        "instances": instances_directory(ports.instances),
        "kprobe_events": kprobe_events_file(ports.kprobe_events),
        "kprobe_profile": kprobe_profile_file(ports.kprobe_events),
        "printk_formats": SeqFile(READ_ONLY, listing(no_records)),
        "saved_cmdlines": SeqFile(READ_ONLY, listing(cmdlines.records)),
        "saved_cmdlines_size": AttributeFile(
            READ_WRITE,
            show=lambda: f"{cmdlines.size}\n",
            store=lambda data: cmdlines.resize(kstrtoul(data)),
        ),
        "saved_tgids": SeqFile(READ_ONLY, listing(cmdlines.tgid_records)),
        "synthetic_events": definitions_file(ports.synthetic_events),
        "uprobe_events": definitions_file(ports.uprobe_events),
        "uprobe_profile": SeqFile(READ_ONLY, listing(ports.uprobe_events.profile_records)),
        **({} if ports.graph is None else _graph_files(ports.graph)),
        **({} if ports.stack is None else _stack_files(ports.stack)),
    }


def _graph_files(graph: GraphPort) -> dict[str, Node]:
    def set_threshold(data: bytes) -> None:
        graph.threshold_ns = kstrtoul(data) * 1000 & _ULONG_MAX

    return {
        "max_graph_depth": AttributeFile(
            READ_WRITE,
            show=lambda: f"{graph.max_depth}\n",
            store=lambda data: graph.set_max_depth(kstrtoul(data)),
        ),
        "tracing_thresh": AttributeFile(
            READ_WRITE,
            show=lambda: f"{-1 if graph.threshold_ns == _ULONG_MAX else graph.threshold_ns // 1000}\n",
            store=set_threshold,
        ),
        "set_graph_function": _function_set(graph.functions),
        "set_graph_notrace": _function_set(graph.notrace),
    }


def _stack_files(stack: StackTracerPort) -> dict[str, Node]:
    return {
        "stack_max_size": AttributeFile(
            READ_WRITE,
            show=lambda: f"{stack.max_size}\n",
            store=lambda data: stack.set_max_size(kstrtoul(data)),
        ),
        "stack_trace": SeqFile(READ_ONLY, listing(stack.records)),
        "stack_trace_filter": _function_set(stack.filter),
    }


def _function_set(port: ListPort) -> File:
    return CommandFile(READ_WRITE, listing(port.records), port.write, port.clear)


def no_records() -> Iterable[str]:
    """The kernel has no trace_printk() of its own whose format would stand in a record."""
    return ()


def definitions_file(port: ListPort) -> File:
    """Definitions to read, definitions to write; opening it with O_TRUNC deletes all."""
    return GuestLinesFile(READ_WRITE, listing(port.records), port.write, port.clear)


def kprobe_events_file(port: KprobeEventsPort) -> File:
    """As definitions_file, of kprobe events alone."""
    return GuestLinesFile(READ_WRITE, port.definitions, port.execute, port.clear)


def kprobe_profile_file(port: KprobeEventsPort) -> File:
    """Hits and misses of each event."""
    return SeqFile(READ_ONLY, port.profile)
