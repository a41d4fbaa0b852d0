"""The files of a trace array: those that the top directory and each instance have alike."""

from __future__ import annotations

import errno

from emulated_kernel.errors import KernelError
from emulated_kernel.vfs.events import events_directory
from emulated_kernel.vfs.modes import DIRECTORY, OWNER_WRITE_ONLY, READ_ONLY, READ_WRITE, WRITE_ONLY
from emulated_kernel.vfs.node import Directory, File, Node
from emulated_kernel.vfs.parse import cpumask, kstrtoul
from emulated_kernel.vfs.ports import ListPort
from emulated_kernel.vfs.seq import (
    AttributeFile,
    CommandFile,
    LastCloseFile,
    MarkerFile,
    PausingFile,
    PipeFile,
    listing,
    single,
)
from emulated_kernel.vfs.trace_ports import (
    ErrorLogPort,
    FunctionTracerPort,
    InstancePort,
    OptionsPort,
    TracePort,
)

NAME_MAX = 100
"""Longest tracer name. Mirrors: kernel/trace/trace.c:MAX_TRACER_SIZE (v6.1)."""
CLOCK_BUFFER = 64
"""A clock's name is shorter. Mirrors: kernel/trace/trace.c:tracing_clock_write (v6.1)."""
_MASK_CHUNK = 32


def trace_array_files(port: InstancePort, *, instance: bool = False) -> dict[str, Node]:
    """Names and nodes. Mirrors: kernel/trace/trace.c:init_tracer_tracefs (v6.1)."""
    trace, events = port.trace, port.events
    return {
        **_buffer_files(trace),
        **_control_files(trace),
        "error_log": _error_log(port.errors),
        "events": events_directory(events),
        "options": options_directory(trace.options, instance=instance),
        "per_cpu": Directory(DIRECTORY, {f"cpu{cpu}": _per_cpu(trace, cpu) for cpu in range(trace.cpus)}),
        **_function_files(port.functions),
        "set_event": _list_file(events.chosen),
        "set_event_notrace_pid": _list_file(trace.pids.untraced),
        "set_event_pid": _list_file(trace.pids.traced),
    }


def _function_files(functions: FunctionTracerPort) -> dict[str, Node]:
    """Mirrors: kernel/trace/ftrace.c:ftrace_create_filter_files, ftrace_init_tracefs (v6.1)."""
    return {
        "set_ftrace_filter": _list_file(functions.filter),
        "set_ftrace_notrace": _list_file(functions.notrace),
        "set_ftrace_notrace_pid": _list_file(functions.untraced_pids),
        "set_ftrace_pid": _list_file(functions.traced_pids),
    }


def _buffer_files(trace: TracePort) -> dict[str, Node]:
    return {
        "buffer_percent": AttributeFile(
            READ_WRITE,
            show=lambda: f"{trace.buffer_percent}\n",
            store=lambda data: trace.set_buffer_percent(kstrtoul(data)),
        ),
        "buffer_size_kb": _buffer_size(trace, None),
        "buffer_total_size_kb": AttributeFile(READ_ONLY, trace.buffer_total_size_text),
        "free_buffer": LastCloseFile(OWNER_WRITE_ONLY, trace.free_buffer),
        "snapshot": _snapshot(trace, None),
        "trace": _trace_file(trace, None),
        "trace_marker": MarkerFile(WRITE_ONLY, None, execute=trace.write_marker),
        "trace_marker_raw": MarkerFile(WRITE_ONLY, None, execute=trace.write_raw_marker),
        "trace_pipe": PipeFile(READ_ONLY, lambda nonblock: trace.open_pipe(nonblock=nonblock)),
    }


def _control_files(trace: TracePort) -> dict[str, Node]:
    return {
        "available_tracers": AttributeFile(READ_ONLY, show=lambda: " ".join(trace.tracers()) + "\n"),
        "current_tracer": AttributeFile(
            READ_WRITE,
            show=lambda: f"{trace.current_tracer}\n",
            store=lambda data: trace.set_tracer(tracer_name(data)),
        ),
        "timestamp_mode": AttributeFile(READ_ONLY, trace.timestamp_mode_text),
        "trace_clock": AttributeFile(
            READ_WRITE, trace.clock_text, store=lambda data: trace.set_clock(clock_name(data))
        ),
        "trace_options": CommandFile(READ_WRITE, single(trace.options.text), trace.options.write),
        "tracing_cpumask": AttributeFile(
            READ_WRITE,
            show=lambda: mask_text(trace.cpumask, trace.cpus),
            store=lambda data: trace.set_cpumask(cpumask(data, trace.cpus)),
        ),
        "tracing_max_latency": _max_latency(trace),
        "tracing_on": AttributeFile(
            READ_WRITE,
            show=lambda: f"{trace.tracing_on:d}\n",
            store=lambda data: trace.set_tracing_on(kstrtoul(data) != 0),
        ),
    }


def _per_cpu(trace: TracePort, cpu: int) -> Directory:
    return Directory(
        DIRECTORY,
        {
            "buffer_size_kb": _buffer_size(trace, cpu),
            "snapshot": _snapshot(trace, cpu),
            "snapshot_raw": PipeFile(READ_ONLY, lambda _nonblock: trace.open_raw_pipe(cpu, snapshot=True)),
            "stats": AttributeFile(READ_ONLY, show=lambda: trace.stats_text(cpu)),
            "trace": _trace_file(trace, cpu),
            "trace_pipe": PipeFile(READ_ONLY, lambda nonblock: trace.open_pipe(cpu, nonblock=nonblock)),
            "trace_pipe_raw": PipeFile(READ_ONLY, lambda _nonblock: trace.open_raw_pipe(cpu)),
        },
    )


def options_directory(options: OptionsPort, *, instance: bool) -> Directory:
    """options/: a switch each."""
    return Directory(DIRECTORY, {name: _option(options, name) for name in options.names(instance=instance)})


def _option(options: OptionsPort, name: str) -> File:
    return AttributeFile(
        READ_WRITE,
        show=lambda: f"{options.get(name):d}\n",
        store=lambda data: options.set(name, kstrtoul(data)),
    )


def _trace_file(trace: TracePort, cpu: int | None) -> File:
    return PausingFile(
        READ_WRITE, single(lambda: trace.trace_text(cpu)), lambda: trace.clear_trace(cpu), trace
    )


def _snapshot(trace: TracePort, cpu: int | None) -> File:
    def execute(data: bytes) -> int:
        trace.snapshot.write(kstrtoul(data), cpu)
        return len(data)

    return CommandFile(READ_WRITE, single(lambda: trace.snapshot.text(cpu)), execute)


def _buffer_size(trace: TracePort, cpu: int | None) -> File:
    return AttributeFile(
        READ_WRITE,
        show=lambda: trace.buffer_size_text(cpu),
        store=lambda data: resize_buffer(trace, data, cpu),
    )


def _max_latency(trace: TracePort) -> File:
    """In microseconds. Mirrors: kernel/trace/trace.c:tracing_nsecs_read, tracing_nsecs_write (v6.1)."""

    def store(data: bytes) -> None:
        trace.max_latency_ns = kstrtoul(data) * 1000

    return AttributeFile(READ_WRITE, show=lambda: f"{(trace.max_latency_ns + 500) // 1000}\n", store=store)


def _error_log(errors: ErrorLogPort) -> File:
    return CommandFile(READ_WRITE, listing(errors.records), execute=len, truncate=errors.clear)


def _list_file(port: ListPort) -> File:
    return CommandFile(READ_WRITE, listing(port.records), port.write, port.clear)


def resize_buffer(trace: TracePort, data: bytes, cpu: int | None = None) -> None:
    """Raises: KernelError EINVAL for 0. Mirrors: kernel/trace/trace.c:tracing_entries_write (v6.1)."""
    size_kb = kstrtoul(data)
    if size_kb == 0:
        raise KernelError(errno.EINVAL, "a buffer holds at least one page")
    trace.resize_buffer(size_kb, cpu)


def tracer_name(data: bytes) -> str:
    """The written name, without blanks around it. Mirrors: tracing_set_trace_write (v6.1)."""
    return data[:NAME_MAX].decode("latin-1").strip()


def clock_name(data: bytes) -> str:
    """The written name, without blanks around it.

    Raises: KernelError EINVAL (too long). Mirrors: kernel/trace/trace.c:tracing_clock_write (v6.1).
    """
    if len(data) >= CLOCK_BUFFER:
        raise KernelError(errno.EINVAL, "no clock has so long a name")
    return data.split(b"\0", 1)[0].decode("latin-1").strip()


def mask_text(mask: int, cpus: int) -> str:
    """A set of CPUs in hexadecimal, commas between 32 bits. Mirrors: lib/vsprintf.c:bitmap_string (v6.1)."""
    chunks = []
    for start in range((cpus - 1) // _MASK_CHUNK * _MASK_CHUNK, -1, -_MASK_CHUNK):
        digits = -(-min(_MASK_CHUNK, cpus - start) // 4)
        chunks.append(f"{mask >> start & 0xFFFFFFFF:0{digits}x}")
    return ",".join(chunks) + "\n"
