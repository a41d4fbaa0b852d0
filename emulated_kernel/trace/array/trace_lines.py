"""The lines of a trace file: records of all CPUs in the order of time, as text."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

from emulated_kernel.trace.output.function_graph import GraphPrinter
from emulated_kernel.trace.output.line_formatter import LineFormatter, TimedRecord
from emulated_kernel.trace.ring.buffer import RingBuffer


def trace_lines(
    entries: Iterator[TimedRecord], formatter: LineFormatter, graph: GraphPrinter | None, *, annotate: bool
) -> Iterator[str]:
    """A line for each record; `annotate`: with notes where a CPU's begin, if the formatter has them."""
    started: set[int] = set()
    annotate = annotate and formatter.annotates
    entry = next(entries, None)
    index = -1
    while entry is not None:
        following = next(entries, None)
        # Linux: from 0 on here, in trace_pipe from 1 on.
        index += 1
        if annotate and entry.cpu not in started:
            started.add(entry.cpu)
            if index:
                yield f"##### CPU {entry.cpu} buffer started ####\n"
        if graph is None or not graph.prints(entry.record):
            yield formatter.line(entry, (following or entry).time_stamp, index)
        else:
            behind = following.record if following is not None and following.cpu == entry.cpu else None
            yield graph.line(entry, behind, formatter)
        entry = following


def timed_records(buffers: Sequence[RingBuffer], cpus: Iterable[int]) -> Iterator[TimedRecord]:
    """What can be read of these CPUs, in the order of time; nothing is consumed."""
    streams = [_cpu_entries(buffers[cpu], cpu) for cpu in cpus if buffers[cpu]]
    return streams[0] if len(streams) == 1 else heapq.merge(*streams, key=itemgetter(0))


def _cpu_entries(buffer: RingBuffer, cpu: int) -> Iterator[TimedRecord]:
    return (TimedRecord(stamp, cpu, record) for stamp, record in buffer)
