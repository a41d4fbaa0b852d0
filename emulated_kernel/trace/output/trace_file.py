"""Trace files: the comment lines of the header, and the records of all CPUs, sorted by time.

Mirrors: kernel/trace/trace.c:trace_default_header, print_trace_header, print_lat_help_header (v6.1).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter

from emulated_kernel.trace.output import graph_output
from emulated_kernel.trace.output.graph_output import GraphPrinter
from emulated_kernel.trace.output.line_formatter import (
    DEFAULT_COLUMNS,
    FlagColumns,
    LineFormatter,
    TimedRecord,
)
from emulated_kernel.trace.output.options import TraceOption
from emulated_kernel.trace.output.tracer_options import TracerOptions
from emulated_kernel.trace.ring.cursor import RingCursor
from emulated_kernel.trace.ring.trace_entry import TRACE_ENTRY
from emulated_kernel.util.control_lock import END
from emulated_kernel.util.fast_dataclass import dataclass

_TGID_COLUMN = ("   TGID   ", "     |    ")
_IRQ_INDENT = 30
_LATENCY_START = "#" + 18 * " "
_IRQ_LEGEND = (
    "  _-----=> irqs-off/BH-disabled",
    " / _----=> need-resched",
    "| / _---=> hardirq/softirq",
    "|| / _--=> preempt-depth",
    "||| / _-=> migrate-disable",
    "|||| /     delay",
)
_LATENCY_LEGEND = (
    "  _------=> CPU#            ",
    " / _-----=> irqs-off/BH-disabled",
    "| / _----=> need-resched    ",
    "|| / _---=> hardirq/softirq ",
    "||| / _--=> preempt-depth   ",
    "|||| / _-=> migrate-disable ",
    "||||| /     delay           ",
)
_OLD_IRQ_LEGEND = (
    "  _-----=> irqs-off",
    " / _----=> need-resched",
    "| / _---=> hardirq/softirq",
    "|| / _--=> preempt-depth",
    "||| /     delay",
)
"""The legend of the flags' columns up to Linux 5.10, without migrate-disable."""
_OLD_LATENCY_LEGEND = (
    "  _------=> CPU#            ",
    " / _-----=> irqs-off        ",
    "| / _----=> need-resched    ",
    "|| / _---=> hardirq/softirq ",
    "||| / _--=> preempt-depth   ",
    "|||| /     delay            ",
)


@dataclass(frozen=True)
class TraceHeader:
    """Properties of a trace array and its kernel that the header shows."""

    tracer: str
    entries: int
    """Number of events in the buffers."""
    total: int
    """Number of events in the buffers plus number of overwritten events."""
    cpus: int
    release: str
    tracer_options: TracerOptions
    columns: FlagColumns = DEFAULT_COLUMNS


def header_text(facts: TraceHeader, flags: TraceOption) -> str:
    """Return the header of a trace file. The trace options `flags` select the lines and columns.

    Mirrors: kernel/trace/trace_functions_graph.c:print_graph_headers_flags (v6.1).
    """
    start = f"# tracer: {facts.tracer}\n#\n"
    latency = TraceOption.LATENCY_FMT in flags
    verbose = TraceOption.VERBOSE in flags
    if TraceOption.CONTEXT_INFO not in flags or (latency and not facts.entries):
        return start
    if latency:
        start += _latency_header(facts)
    if facts.tracer == graph_output.NAME:
        return start + graph_output.header(facts.tracer_options, latency=latency)
    if verbose:
        return start
    if latency:
        return start + _latency_legend(facts.columns)
    tgid = TraceOption.RECORD_TGID in flags
    info = f"# entries-in-buffer/entries-written: {facts.entries}/{facts.total}   #P:{facts.cpus}\n#\n"
    return start + info + _columns(tgid, facts.columns, irqs=TraceOption.IRQ_INFO in flags)


def _columns(tgid: bool, columns: FlagColumns, *, irqs: bool) -> str:
    name, mark = _TGID_COLUMN if tgid else ("", "")
    lines = _IRQ_LEGEND if columns.has_migrate else _OLD_IRQ_LEGEND
    legend = "".join(f"#{'':{_IRQ_INDENT + len(name)}}{line}\n" for line in lines if irqs)
    flags, marks = ("  |||||", "   |||||") if columns.has_migrate else ("  |||| ", "   |||| ")
    if not irqs:
        flags, marks = "   ", "    "
    return (
        f"{legend}"
        f"#           TASK-PID    {name} CPU#{flags}  TIMESTAMP  FUNCTION\n"
        f"#              | |      {mark}   |{marks}     |         |\n"
    )


def _latency_header(facts: TraceHeader) -> str:
    """Return the header lines that the option latency-format adds.

    The text after `M:` is the name of the kernel's preemption model.
    """
    rule = "#    -----------------\n"
    return (
        f"# {facts.tracer} latency trace v1.1.5 on {facts.release}\n"
        f"# {'':->68}\n"
        f"# latency: 0 us, #{facts.entries}/{facts.total}, CPU#0 |"
        f" (M:desktop VP:0, KP:0, SP:0 HP:0 #P:{facts.cpus})\n"
        f"{rule}#    | task: -0 (uid:0 nice:0 policy:0 rt_prio:0)\n{rule}#\n"
    )


def _latency_legend(columns: FlagColumns) -> str:
    lines: tuple[str, ...] = (
        *_OLD_LATENCY_LEGEND,
        "#  cmd     pid     ||||| time  |   caller      ",
        "#     \\   /        |||||  \\    |   /         ",
    )
    if columns.has_migrate:
        lines = (
            *_LATENCY_LEGEND,
            "#  cmd     pid     |||||| time  |   caller     ",
            "#     \\   /        ||||||  \\    |    /       ",
        )
    return "".join(f"{line if line[0] == '#' else _LATENCY_START + line}\n" for line in lines)


def trace_lines(
    entries: Iterator[TimedRecord],
    formatter: LineFormatter,
    graph: GraphPrinter | None,
    *,
    annotate: bool,
    later: Callable[[], Iterator[TimedRecord]] | None = None,
) -> Iterator[str]:
    """Yield the text of each record: as a call graph that `graph` prints, or in plain lines if it is None.

    `later`: function that returns the records that were written after those of `entries` and of its earlier
    calls. If it is given, the iterator has no end: it yields END after `entries`, then the later records and
    END again, and so on. If it is None, the iterator ends after `entries`.

    If `annotate` and the formatter's options allow it, the line "CPU N buffer started" precedes the first
    record of each CPU. There is no such line for the CPU of the file's first record.
    """
    started: set[int] = set()
    annotate = annotate and formatter.annotates
    entry = next(entries, None)
    index = -1
    while entry is not None or later is not None:
        if entry is None:
            assert later is not None
            yield END
            entries = later()
            entry = next(entries, None)
            continue
        following = next(entries, None)
        # Linux: the index starts at 0 here, but at 1 in trace_pipe.
        index += 1
        if annotate and entry.cpu not in started:
            started.add(entry.cpu)
            if index:
                yield f"##### CPU {entry.cpu} buffer started ####\n"
        # Linux: unlike trace_pipe, a trace file does not count lost events.
        lost = f"CPU:{entry.cpu} [LOST EVENTS]\n" if entry.follows_lost else ""
        if graph is None or not graph.prints(entry.record):
            yield lost + formatter.line(entry, (following or entry).time_stamp, index)
        else:
            next_on_cpu = following.record if following is not None and following.cpu == entry.cpu else None
            yield lost + graph.line(entry, next_on_cpu, formatter)
        entry = following


def timed_records(cursors: Mapping[int, RingCursor]) -> Iterator[TimedRecord]:
    """Yield the records of several CPUs, sorted by time. `cursors`: CPU -> position in the CPU's buffer."""
    streams = [_cpu_entries(cursor, cpu) for cpu, cursor in cursors.items()]
    return streams[0] if len(streams) == 1 else heapq.merge(*streams, key=itemgetter(0))


def _cpu_entries(cursor: RingCursor, cpu: int) -> Iterator[TimedRecord]:
    # Only guest code that damages the buffer can have written a record without a header.
    return (
        TimedRecord(stamp, cpu, record, follows_lost)
        for stamp, record, follows_lost in cursor
        if len(record) >= TRACE_ENTRY.size
    )
