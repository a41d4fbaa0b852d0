"""tracefs, as far as this kernel has it: a file stands here when all of it works."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass

from emulated_kernel.errors import KernelError
from emulated_kernel.vfs.node import Directory, DynamicDirectory, File, Objects
from emulated_kernel.vfs.parse import kstrtoul, switch
from emulated_kernel.vfs.ports import EventPort, EventsPort, GroupPort, KprobeEventsPort, TracePort
from emulated_kernel.vfs.readme import readme
from emulated_kernel.vfs.seq import (
    AttributeFile,
    CommandFile,
    LinesFile,
    MarkerFile,
    OneReadFile,
    PipeFile,
    SeqFile,
    listing,
    single,
)

DIRECTORY = 0o750
READ_WRITE = 0o640
READ_ONLY = 0o440
WRITE_ONLY = 0o220
ROOT = 0o700
NAME_MAX = 100
"""Longest tracer name. Mirrors: kernel/trace/trace.c:MAX_TRACER_SIZE (v6.1)."""


@dataclass(frozen=True)
class TracefsPorts:
    """The parts of the kernel that tracefs is a view of."""

    trace: TracePort
    events: EventsPort
    kprobe_events: KprobeEventsPort
    return_probes: bool = False
    """Whether kprobe_events takes `r`; README says so."""


def tracefs_directory(ports: TracefsPorts) -> Directory:
    """The whole of tracefs; its root is for its owner alone."""
    trace = ports.trace
    return Directory(
        ROOT,
        {
            "README": AttributeFile(READ_ONLY, show=lambda: readme(ports.return_probes)),
            "available_events": SeqFile(READ_ONLY, listing(lambda: available_events(ports.events))),
            "available_tracers": AttributeFile(READ_ONLY, show=lambda: " ".join(trace.tracers()) + "\n"),
            "buffer_size_kb": AttributeFile(
                READ_WRITE, trace.buffer_size_text, lambda data: resize_buffer(trace, data)
            ),
            "buffer_total_size_kb": AttributeFile(READ_ONLY, trace.buffer_total_size_text),
            "current_tracer": AttributeFile(
                READ_WRITE,
                show=lambda: f"{trace.current_tracer}\n",
                store=lambda data: trace.set_tracer(tracer_name(data)),
            ),
            "error_log": CommandFile(
                READ_WRITE, listing(trace.error_log), execute=len, truncate=trace.clear_error_log
            ),
            "events": events_directory(ports.events),
            "kprobe_events": kprobe_events_file(ports.kprobe_events),
            "kprobe_profile": kprobe_profile_file(ports.kprobe_events),
            "trace": CommandFile(
                READ_WRITE, single(trace.trace_text), execute=len, truncate=trace.clear_trace
            ),
            "trace_marker": MarkerFile(WRITE_ONLY, None, execute=trace.write_marker),
            "trace_pipe": PipeFile(READ_ONLY, lambda nonblock: trace.open_pipe(nonblock=nonblock)),
            "tracing_on": AttributeFile(
                READ_WRITE,
                show=lambda: f"{trace.tracing_on:d}\n",
                store=lambda data: trace.set_tracing_on(kstrtoul(data) != 0),
            ),
        },
    )


def kprobe_events_file(port: KprobeEventsPort) -> File:
    """Definitions to read, definitions to write; opening it with O_TRUNC deletes all."""
    return LinesFile(READ_WRITE, listing(port.definitions), port.execute, port.clear)


def kprobe_profile_file(port: KprobeEventsPort) -> File:
    """Hits and misses of each event."""
    return SeqFile(READ_ONLY, listing(port.profile))


def events_directory(events: EventsPort) -> Directory:
    """events/: a directory for each group, and the switch for all events."""
    return DynamicDirectory(
        DIRECTORY,
        Objects(events.names, events.find, _group_directory),
        {"enable": _group_enable(events)},
    )


def available_events(events: EventsPort) -> Iterator[str]:
    """group:event, a line for each event."""
    for group_name in events.names():
        group = events.find(group_name)
        for name in group.names() if group else ():
            yield f"{group_name}:{name}\n"


def resize_buffer(trace: TracePort, data: bytes) -> None:
    """Raises: KernelError EINVAL for 0. Mirrors: kernel/trace/trace.c:tracing_entries_write (v6.1)."""
    size_kb = kstrtoul(data)
    if size_kb == 0:
        raise KernelError(errno.EINVAL, "a buffer holds at least one page")
    trace.resize_buffer(size_kb)


def tracer_name(data: bytes) -> str:
    """The written name, without blanks at its end. Mirrors: tracing_set_trace_write (v6.1)."""
    return data[:NAME_MAX].decode("latin-1").rstrip()


def _group_directory(group: GroupPort) -> Directory:
    return DynamicDirectory(
        DIRECTORY,
        Objects(group.names, group.find, _event_directory),
        {
            "enable": _group_enable(group),
            "filter": OneReadFile(READ_WRITE, group.filter_text, group.set_filter),
        },
    )


def _group_enable(group: GroupPort | EventsPort) -> File:
    return AttributeFile(
        READ_WRITE,
        show=lambda: f"{group.enabled_text()}\n",
        store=lambda data: group.set_enabled(switch(data)),
    )


def _event_directory(event: EventPort) -> Directory:
    return Directory(
        DIRECTORY,
        {
            "enable": AttributeFile(
                READ_WRITE,
                show=lambda: f"{event.enabled:d}\n",
                store=lambda data: event.set_enabled(switch(data)),
            ),
            "filter": OneReadFile(READ_WRITE, event.filter_text, event.set_filter),
            "format": SeqFile(READ_ONLY, single(event.format_text)),
            "id": AttributeFile(READ_ONLY, show=lambda: f"{event.id}\n"),
        },
    )
