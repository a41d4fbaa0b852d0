"""A trace array (tracefs itself, or an instance): ring buffers with options, clock and texts."""

from __future__ import annotations

import errno
import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Protocol

from emulated_kernel.errors import KernelError
from emulated_kernel.trace import function_graph
from emulated_kernel.trace.clock import (
    LOCAL,
    ClockSource,
    TraceClock,
    clocks_text,
    find_clock,
    ns_to_usecs,
)
from emulated_kernel.trace.cmdlines import SavedCmdlines
from emulated_kernel.trace.dynamic_events import discard
from emulated_kernel.trace.event_pids import EventPids
from emulated_kernel.trace.function_graph import GraphPrinter
from emulated_kernel.trace.header import HeaderFacts, header_text
from emulated_kernel.trace.options import TraceOption, TraceOptions
from emulated_kernel.trace.output import Entry, LineFormatter
from emulated_kernel.trace.ports import EntryPlace, TraceSymbols
from emulated_kernel.trace.raw_pipe import RawPipe
from emulated_kernel.trace.ring_buffer import RingBuffer
from emulated_kernel.trace.ring_layout import (
    CONTROL_SIZE,
    RingControls,
    RingMemory,
    memory_size,
    pages_for,
)
from emulated_kernel.trace.snapshot import Snapshot
from emulated_kernel.trace.symbolizer import CachedSymbols
from emulated_kernel.trace.trace_entry import TRACE_ENTRY, AddressStyle, EntryType, EventTable, print_entry
from emulated_kernel.trace.trace_pipe import PipeUsers, TracePipe
from emulated_kernel.trace.tracer_options import TracerOptions

DEFAULT_BUFFER_SIZE = 1441792
"""Bytes of events a CPU once something is traced. Mirrors: kernel/trace/trace.c:TRACE_BUF_SIZE_DEFAULT."""
UNEXPANDED_SIZE = 1
MAX_BUFFER_SIZE = 256 << 20
MARKER_LIMIT = 1024
RAW_MARKER_LIMIT = 3072


NOP_TRACER = "nop"
FUNCTION_TRACER = "function"


@dataclass(frozen=True)
class TaskContext:
    """Who does something, for records made on a task's behalf."""

    pid: int = 0
    comm: str = "swapper/0"
    tgid: int = 0
    cpu: int = 0
    flags: int = 0
    preempt_count: int = 0


def allocate_controls(cpus: int) -> RingControls:
    """Control blocks out of the guest's sight."""
    return RingControls([memoryview(bytearray(CONTROL_SIZE)) for _ in range(cpus)])


def allocate_memory(size: int) -> RingMemory:
    """Memory for a ring buffer out of the guest's sight. Raises: MemoryError."""
    if size > MAX_BUFFER_SIZE:
        raise MemoryError(f"{size} bytes for a ring buffer")
    return RingMemory(memoryview(bytearray(size)))


class Expansion:
    """Whether buffers got their full size: no memory is spent on them before something is traced.

    Mirrors: kernel/trace/trace.c:ring_buffer_expanded (v6.1)
    """

    is_done = False


@dataclass(frozen=True)
class TraceSystem:
    """What all trace arrays of a kernel share."""

    cpus: int
    now_ns: Callable[[], int]
    """The machine's nanoseconds since boot."""
    events: EventTable
    """Asked while printing."""
    symbols: TraceSymbols
    word_size: int = 8
    """Bytes of the guest's unsigned long."""
    current: Callable[[], TaskContext] = TaskContext
    """The task that writes a marker."""
    release: str = "6.1.0"
    preemption: str = "desktop"
    clocks: ClockSource = field(default_factory=ClockSource)
    cmdlines: SavedCmdlines = field(default_factory=SavedCmdlines)
    tracer_options: TracerOptions = field(default_factory=TracerOptions)
    allocate: Callable[[int], RingMemory] = allocate_memory
    """Zeroed or not, writable memory of that many bytes. Raises: MemoryError."""
    allocate_controls: Callable[[int], RingControls] = allocate_controls
    """Control blocks for that many CPUs. Raises: MemoryError."""
    expansion: Expansion = field(default_factory=Expansion)
    printk: Callable[[str], None] = discard
    """A line of the kernel's log."""


class Tracer(Protocol):
    """What fills the buffer while it is the current tracer."""

    def start(self) -> None:
        """Raises: KernelError where it can't."""

    def stop(self) -> None: ...


class TraceArray:
    """The ring buffers of all CPUs and everything that shows or controls them.

    Callers serialise all methods with one lock; `listeners` are called under it.
    Mirrors: kernel/trace/trace.c:struct trace_array (v6.1)
    """

    def __init__(self, system: TraceSystem, *, expanded: bool = False) -> None:
        """`expanded`: with buffers of full size at once, as instances have."""
        self.system = system
        self.options = TraceOptions(
            self._option_changed,
            system.tracer_options,
            self.tracers,
            lambda: self.current_tracer,
            system.printk,
        )
        self.clock: TraceClock = LOCAL
        self.current_tracer = NOP_TRACER
        self.tracer_kinds: dict[str, Tracer] = {}
        """Tracers beside nop, by name; Linux lists the latest first."""
        self.buffer_percent = 50
        self.listeners: list[Callable[[], None]] = []
        self.on_marker: Callable[[bytes], Callable[[], None] | None] = lambda _text: None
        """Told of a marker's text before it is recorded; what it returns is called afterwards."""
        self.rewired: list[Callable[[], None]] = []
        """Called when what guest code has to know to record here differs: see notify_rewired()."""
        self.pipe_users = PipeUsers()
        self.pids = EventPids(self.notify_rewired)
        self.cpumask = (1 << system.cpus) - 1
        """CPUs whose events are recorded, a bit each."""
        self.max_latency_ns = 0
        """What a latency tracer measured, or was told."""
        self._stamp = system.clocks.converter(LOCAL)
        self._time_start = 0
        self._tracing_on = True
        self._stopped = 0
        self._records_comm, self._records_tgid = True, False
        self._controls: list[RingControls] = []
        self.buffers = self.new_buffers(pages_for(DEFAULT_BUFFER_SIZE if expanded else UNEXPANDED_SIZE))
        self.snapshot = Snapshot(self)

    @property
    def cpus(self) -> int:
        """CPUs that have a buffer."""
        return self.system.cpus

    # -- recording

    def record(
        self,
        event_id: int,
        payload: bytes,
        *,
        cpu: int,
        pid: int,
        comm: str | None = None,
        flags: int = 0,
        preempt_count: int = 0,
        timestamp_ns: int,
        place: EntryPlace | None = None,
    ) -> bool:
        """Append a record to the buffer of `cpu`, or to `place`; False if tracing is off or there is no room.

        `payload` is what follows the trace_entry; `comm`, where known, is remembered for `pid`.
        """
        stamp = self._stamp
        header = TRACE_ENTRY.pack(event_id, flags, preempt_count, pid)
        when = timestamp_ns if stamp is None else stamp(timestamp_ns)
        buffer = self.buffers[cpu] if place is None else place
        if not buffer.write(header + payload, when):
            return False
        if comm is not None:
            self._note_task(pid, comm)
        if self.listeners:
            self.notify()
        return True

    def _note_task(self, pid: int, comm: str) -> None:
        """As the options record-cmd and record-tgid say; each task of the guest is a thread group."""
        if self._records_comm:
            self.system.cmdlines.save(pid, comm)
        if self._records_tgid:
            self.system.cmdlines.save_tgid(pid, pid)

    def notify(self) -> None:
        """Tell the listeners that there may be data, or a reason to stop waiting for it.

        Call it too after guest code wrote into a buffer's memory.
        """
        for listener in tuple(self.listeners):
            listener()

    @property
    def written(self) -> int:
        """Records made since the buffers were emptied, guest code's too."""
        return sum(buffer.written for buffer in self.buffers)

    def notify_rewired(self) -> None:
        """Tell that other buffers take the place of those so far, or that a clock or an option changed.

        Guest code writes to the old ones until this is called.
        """
        for listener in tuple(self.rewired):
            listener()

    def release(self) -> None:
        """Give the buffers' memory back: nothing records here any more."""
        for buffer in (*self.buffers, *self.snapshot.buffers):
            buffer.place.release()
        for controls in self._controls:
            controls.release()

    def new_buffers(self, pages: int) -> list[RingBuffer]:
        """An empty buffer a CPU, of that many sub-buffers. Raises: MemoryError."""
        system = self.system
        controls = system.allocate_controls(system.cpus)
        self._controls.append(controls)
        places = (controls.place(cpu, system.allocate(memory_size(pages))) for cpu in range(system.cpus))
        return [RingBuffer(place, pages) for place in places]

    def write_marker(self, data: bytes) -> int:
        """Execute one write(2) to trace_marker: a PRINT record of the current task; bytes taken.

        Raises: KernelError EINVAL (option markers is off), EBADF (tracing is off).
        Mirrors: kernel/trace/trace.c:tracing_mark_write (v6.1)
        """
        self._check_markers()
        if not data:
            return 0
        text = data[:MARKER_LIMIT]
        recorded = self.on_marker(text) if self._tracing_on else None
        self._write_mark(EntryType.PRINT, print_entry(text, self.system.word_size))
        if recorded is not None:
            recorded()
        return len(text)

    def write_raw_marker(self, data: bytes) -> int:
        """Execute one write(2) to trace_marker_raw: a u32 of the writer's choice and bytes; bytes taken.

        Raises: KernelError EINVAL (option markers is off, size), EBADF (tracing is off).
        Mirrors: kernel/trace/trace.c:tracing_mark_raw_write (v6.1)
        """
        self._check_markers()
        if not 4 <= len(data) <= RAW_MARKER_LIMIT:
            raise KernelError(errno.EINVAL, "a raw marker has 4 to 3072 bytes")
        self._write_mark(EntryType.RAW_DATA, data)
        return len(data)

    def _check_markers(self) -> None:
        if not self.options.flags & TraceOption.MARKERS:
            raise KernelError(errno.EINVAL, "markers are switched off")

    def _write_mark(self, kind: EntryType, body: bytes) -> None:
        task = self.system.current()
        written = self.record(
            kind,
            body,
            cpu=task.cpu,
            pid=task.pid,
            comm=task.comm,
            flags=task.flags,
            preempt_count=task.preempt_count,
            timestamp_ns=self.system.now_ns(),
        )
        if not written:
            raise KernelError(errno.EBADF, "tracing is off")

    # -- the trace file

    def trace_text(self, cpu: int | None = None, buffers: Sequence[RingBuffer] | None = None) -> str:
        """The trace file, of one CPU or of all in the order of time; nothing is consumed.

        The header tells of all CPUs in either case. `buffers` are the array's own where not given.
        """
        buffers = self.buffers if buffers is None else buffers
        flags = self.options.flags
        stats = [buffer.stats() for buffer in buffers]
        entries = sum(s.entries for s in stats)
        overruns = sum(s.overrun for s in stats)
        facts = HeaderFacts(
            tracer=self.current_tracer,
            entries=entries,
            total=entries + overruns,
            cpus=self.system.cpus,
            release=self.system.release,
            preemption=self.system.preemption,
            tracer_options=self.system.tracer_options,
        )
        lines = self._lines(_entries(buffers, self._cpus(cpu)), annotate=overruns > 0)
        return header_text(facts, flags) + "".join(lines)

    def _cpus(self, cpu: int | None) -> range:
        return range(self.system.cpus) if cpu is None else range(cpu, cpu + 1)

    def _lines(self, entries: Iterator[Entry], *, annotate: bool) -> Iterator[str]:
        formatter = self.formatter()
        graph = self.graph_printer()
        started: set[int] = set()
        annotate = annotate and formatter.annotates
        entry = next(entries, None)
        index = 0
        while entry is not None:
            following = next(entries, None)
            index += 1
            if annotate and entry.cpu not in started:
                started.add(entry.cpu)
                if index > 1:
                    yield f"##### CPU {entry.cpu} buffer started ####\n"
            if graph is None or not graph.prints(entry.record):
                yield formatter.line(entry, (following or entry).time_stamp, index)
            else:
                behind = following.record if following is not None and following.cpu == entry.cpu else None
                yield graph.line(entry, behind, formatter)
            entry = following

    def graph_printer(self) -> GraphPrinter | None:
        """What prints the records while the tracer is function_graph."""
        if self.current_tracer != function_graph.NAME:
            return None
        return GraphPrinter(self.system.cpus, self.system.tracer_options)

    def formatter(self) -> LineFormatter:
        """A printer of records under the options as they are now."""
        system, flags = self.system, self.options.flags
        return LineFormatter(
            flags,
            in_ns=self.clock.in_ns,
            events=system.events,
            cmdlines=system.cmdlines,
            style=AddressStyle(
                CachedSymbols(system.symbols),
                word_size=system.word_size,
                sym_offset=TraceOption.SYM_OFFSET in flags,
                sym_addr=TraceOption.SYM_ADDR in flags,
                print_parent=TraceOption.PRINT_PARENT in flags,
            ),
            time_start=self._time_start,
        )

    def clear_trace(self, cpu: int | None = None) -> None:
        """Forget the events of one CPU or of all: what O_TRUNC does to a trace file opened for writing.

        Mirrors: kernel/trace/trace.c:tracing_reset_cpu, tracing_reset_online_cpus (v6.1)
        """
        for number in self._cpus(cpu):
            self.buffers[number].reset()
        if cpu is None:
            self._time_start = self.now()

    def open_pipe(self, cpu: int | None = None, *, nonblock: bool = False) -> TracePipe:
        """A consuming reader of one CPU or of all, as TracePipe says. Raises: KernelError EBUSY."""
        return TracePipe(self, cpu, nonblock=nonblock)

    def open_raw_pipe(self, cpu: int, *, snapshot: bool = False) -> RawPipe:
        """A consuming reader of one CPU's pages, or of those set aside."""
        return RawPipe(self, cpu, snapshot=snapshot)

    def stats_text(self, cpu: int) -> str:
        """per_cpu/cpuN/stats. Mirrors: kernel/trace/trace.c:tracing_stats_read (v6.1)."""
        stats = self.buffers[cpu].stats()
        return (
            f"entries: {stats.entries}\n"
            f"overrun: {stats.overrun}\n"
            f"commit overrun: {stats.commit_overrun}\n"
            f"bytes: {stats.size}\n"
            f"oldest event ts: {self._time_text(stats.oldest_event_ts)}\n"
            f"now ts: {self._time_text(self.now())}\n"
            f"dropped events: {stats.dropped_events}\n"
            f"read events: {stats.read_events}\n"
        )

    def _time_text(self, stamp: int) -> str:
        if not self.clock.in_ns:
            return str(stamp)
        seconds, usecs = divmod(ns_to_usecs(stamp), 1_000_000)
        return f"{seconds:5d}.{usecs:06d}"

    def now(self) -> int:
        """The time as the clock counts it."""
        now = self.system.now_ns()
        return now if self._stamp is None else self._stamp(now)

    # -- controls

    @property
    def records_comm(self) -> bool:
        """Whether names of tasks are remembered."""
        return self._records_comm

    @property
    def tracing_on(self) -> bool:
        """Whether the buffers take records."""
        return self._tracing_on

    def set_tracing_on(self, on: bool) -> None:
        """Let the buffers take records, or not; switching off wakes who waits for data.

        Mirrors: kernel/trace/trace.c:rb_simple_write (v6.1)
        """
        if on == self._tracing_on:
            return
        self._tracing_on = on
        self.apply_switches()
        if not on:
            self.notify()

    @property
    def is_stopped(self) -> bool:
        """Whether somebody reads a trace that must not change meanwhile."""
        return self._stopped > 0

    @property
    def pauses_for_readers(self) -> bool:
        """Option pause-on-trace."""
        return TraceOption.PAUSE_ON_TRACE in self.options.flags

    def stop(self) -> None:
        """Take no records until start() was called as often. Mirrors: tracing_stop_tr (v6.1)."""
        self._stopped += 1
        self.apply_switches()

    def start(self) -> None:
        """The other half of stop(), without which it does nothing. Mirrors: tracing_start_tr (v6.1)."""
        self._stopped = max(0, self._stopped - 1)
        self.apply_switches()

    def set_cpumask(self, mask: int) -> None:
        """Record the events of these CPUs alone, a bit each. Mirrors: tracing_set_cpumask (v6.1)."""
        self.cpumask = mask
        self.apply_switches()

    def apply_switches(self) -> None:
        """Tell the buffers, which may be other ones now, whether they take records and how."""
        is_on = self._tracing_on and not self._stopped
        overwrite = TraceOption.OVERWRITE in self.options.flags
        for cpu, buffer in enumerate(self.buffers):
            buffer.disabled = not (is_on and self.cpumask >> cpu & 1)
            buffer.overwrite = overwrite

    def tracers(self) -> Collection[str]:
        """Names that current_tracer takes."""
        return (*reversed(self.tracer_kinds), NOP_TRACER)

    def set_tracer(self, name: str) -> None:
        """Use another tracer and expand the buffers. Raises: KernelError EINVAL for an unknown one."""
        self.expand()
        if name not in self.tracers():
            raise KernelError(errno.EINVAL, f"no tracer {name!r}")
        if name == self.current_tracer:
            return
        if self.current_tracer in self.tracer_kinds:
            self.tracer_kinds[self.current_tracer].stop()
        self.current_tracer = NOP_TRACER
        if name in self.tracer_kinds:
            self.tracer_kinds[name].start()
        self.current_tracer = name

    def set_clock(self, name: str) -> None:
        """Count time with another clock; the buffers are cleared, as old times don't compare.

        Raises: KernelError EINVAL for an unknown one. Mirrors: kernel/trace/trace.c:tracing_set_clock (v6.1)
        """
        clock = find_clock(name)
        if clock is None:
            raise KernelError(errno.EINVAL, f"no clock {name!r}")
        self.clock = clock
        self._stamp = self.system.clocks.converter(clock)
        self.clear_trace()
        self.snapshot.clear()
        self.notify_rewired()

    def clock_text(self) -> str:
        """The trace_clock file."""
        return clocks_text(self.clock)

    def timestamp_mode_text(self) -> str:
        """The timestamp_mode file: whether the buffers store times as differences."""
        return "[delta] absolute\n"

    def set_buffer_percent(self, percent: int) -> None:
        """How full a buffer has to be for poll(2) on its CPU's pipe. Raises: KernelError EINVAL."""
        if percent > 100:
            raise KernelError(errno.EINVAL, "more than 100 percent")
        self.buffer_percent = percent

    def take_over(self, flags: TraceOption) -> None:
        """Have these options, which are another trace array's."""
        self.options.flags = flags
        self._records_comm = TraceOption.RECORD_CMD in flags
        self._records_tgid = TraceOption.RECORD_TGID in flags
        self.apply_switches()
        self.notify_rewired()

    def _option_changed(self, option: TraceOption, on: bool) -> None:
        if option is TraceOption.OVERWRITE:
            self.apply_switches()
        elif option is TraceOption.RECORD_CMD:
            self._records_comm = on
        elif option is TraceOption.RECORD_TGID:
            self._records_tgid = on
        self.notify_rewired()

    # -- sizes

    def expand(self) -> None:
        """Give the buffers their full size; whoever enables an event calls it first.

        Mirrors: kernel/trace/trace.c:tracing_update_buffers (v6.1)
        """
        if not self.system.expansion.is_done:
            self._resize(DEFAULT_BUFFER_SIZE, None)

    def resize_buffer(self, size_kb: int, cpu: int | None = None) -> None:
        """Execute a write to buffer_size_kb, of one CPU or of all. Raises: KernelError EINVAL, ENOMEM.

        Mirrors: kernel/trace/trace.c:tracing_entries_write (v6.1)
        """
        if not size_kb:
            raise KernelError(errno.EINVAL, "a buffer has some size")
        self._resize((size_kb << 10) & ((1 << 64) - 1), cpu)

    def _resize(self, size: int, cpu: int | None) -> None:
        pages = pages_for(size)
        self.system.expansion.is_done = True
        changed = [self.buffers[n] for n in self._cpus(cpu) if self.buffers[n].nr_pages != pages]
        try:
            memories = [self.system.allocate(memory_size(pages)) for _ in changed]
        except MemoryError as error:
            raise KernelError(errno.ENOMEM, str(error)) from error
        old = [buffer.place for buffer in changed]
        for buffer, memory in zip(changed, memories, strict=True):
            buffer.resize(buffer.place.moved_to(memory), pages)
        for memory in old:
            memory.release()

    def free_buffer(self) -> None:
        """What closing free_buffer does. Mirrors: kernel/trace/trace.c:tracing_free_buffer_release (v6.1)."""
        if self.options.flags & TraceOption.STOP_ON_FREE:
            self.set_tracing_on(False)
        self._resize(0, None)

    def buffer_size_text(self, cpu: int | None = None) -> str:
        """buffer_size_kb of one CPU or of all; "X" where they differ."""
        sizes = {self.buffers[number].size >> 10 for number in self._cpus(cpu)}
        if len(sizes) > 1:
            return "X\n"
        note = f" (expanded: {DEFAULT_BUFFER_SIZE >> 10})"
        return f"{sizes.pop()}{'' if self.system.expansion.is_done or cpu is not None else note}\n"

    def buffer_total_size_text(self) -> str:
        """buffer_total_size_kb."""
        total = sum(buffer.size >> 10 for buffer in self.buffers)
        full = (DEFAULT_BUFFER_SIZE >> 10) * self.system.cpus
        return f"{total}\n" if self.system.expansion.is_done else f"{total} (expanded: {full})\n"


def _entries(buffers: Sequence[RingBuffer], cpus: Iterable[int]) -> Iterator[Entry]:
    streams = [_cpu_entries(buffers[cpu], cpu) for cpu in cpus if buffers[cpu]]
    return streams[0] if len(streams) == 1 else heapq.merge(*streams, key=itemgetter(0))


def _cpu_entries(buffer: RingBuffer, cpu: int) -> Iterator[Entry]:
    return (Entry(stamp, cpu, record) for stamp, record in buffer)
