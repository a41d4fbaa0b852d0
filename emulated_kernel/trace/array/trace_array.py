"""Trace arrays (tracefs itself or an instance): ring buffers, options, a clock and the texts of files."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from emulated_kernel.trace.array.array_rings import ArrayRings, check_resizable
from emulated_kernel.trace.array.previous_boot import (
    CombinedTaskNames,
    PreviousBootNames,
    PreviousBootRecords,
)
from emulated_kernel.trace.array.services import NOP_TRACER, Tracer, TracingServices
from emulated_kernel.trace.array.snapshot import Snapshot
from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.context.task_check import TaskCheck
from emulated_kernel.trace.events.event import Recorder, TraceEvent
from emulated_kernel.trace.events.event_pids import EventPids
from emulated_kernel.trace.fetch.memory import read_string
from emulated_kernel.trace.filter.predicates import POINTED_STRING_MAX
from emulated_kernel.trace.interface import InterfaceRule
from emulated_kernel.trace.output import graph_output
from emulated_kernel.trace.output.graph_output import GraphPrinter
from emulated_kernel.trace.output.line_formatter import (
    LONG_SEQ_SIZE,
    SEQ_SIZE,
    FlagColumns,
    LineFormatter,
    TimedRecord,
)
from emulated_kernel.trace.output.options import TraceOption, TraceOptions
from emulated_kernel.trace.output.trace_file import (
    TraceHeader,
    header_text,
    timed_records,
    trace_lines,
)
from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.trace.ring.buffer_page import MAX_DATA_SIZE, MAX_ORDER
from emulated_kernel.trace.ring.cursor import RingCursor
from emulated_kernel.trace.ring.ring_layout import RecordTarget, RingMemory, RingShape, pages_for
from emulated_kernel.trace.ring.trace_clock import LOCAL, TraceClock, clocks_text, find_clock, ns_to_usecs
from emulated_kernel.trace.ring.trace_entry import (
    COMMON_SIZE,
    TRACE_ENTRY,
    AddressStyle,
    EntryFlag,
    EntryType,
    RawEntry,
    print_entry,
    raw_data_entry,
    stack_entry,
    user_stack_entry,
)
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.errors import KernelError

MARKER_LIMIT = 1024
"""Maximum size in bytes of the text or data that one write(2) to a marker file records.

Kernels with InterfaceRule.LONG_MARKERS have a higher limit.
"""
RAW_MARKER_LIMIT = 3072
"""Maximum size in bytes of a write(2) to trace_marker_raw.

Kernels with InterfaceRule.LONG_MARKERS have another limit.
"""
_ID_SIZE = 4
"""Size in bytes of the id with which the data of a raw marker begin."""
_NEWLINE_SIZE = 2
"""Size in bytes of the newline and the NUL that are appended to a marker's text."""
_STACKS = TraceOption.STACKTRACE | TraceOption.USERSTACKTRACE

REBOOT_MARK = b"kprobefs: the kernel was rebooted\n"
"""Text of the marker after the records of a kernel that was replaced by a reboot."""


class TraceArray(ArrayRings, Recorder):
    """The ring buffers of all CPUs, the recording of events in them, and the files that show or control them.

    Callers serialise all methods with one lock, and `listeners` are called under it.
    Mirrors: kernel/trace/trace.h:struct trace_array (v6.1).
    """

    def __init__(self, system: TracingServices, name: str = "", *, expanded: bool = False) -> None:
        """Allocate the ring buffers: of full size if `expanded`, else of the smallest size.

        `name`: name of the instance; "" for the top trace array.
        Raises: KernelError ENOMEM (nothing stays allocated).
        """
        super().__init__(system, expanded=expanded)
        self.name = name
        self.options = TraceOptions(
            system.interface,
            system.tracer_options,
            self._options_changed,
            self.tracers,
            lambda: self.current_tracer,
            system.printk,
            self._tracer_option_changed,
        )
        self._columns = FlagColumns(
            InterfaceRule.MIGRATE_COLUMN in system.interface,
            InterfaceRule.LAZY_RESCHED in system.interface,
        )
        self.marker_targets: Callable[[], Iterable[TraceArray]] = lambda: (self,)
        """Returns the trace arrays that record the markers written to this array's marker files."""
        self.clock: TraceClock = LOCAL
        self.current_tracer = NOP_TRACER
        self._tracers = {NOP_TRACER: Tracer()}
        """Name -> tracer, in the order of registration."""
        self.buffer_percent = 50
        """Percentage of a CPU's buffer that must be full before poll(2) reports the CPU's pipe as ready."""
        self.piped: set[int | None] = set()
        """CPUs whose trace_pipe is open; None is in the set if the trace_pipe of all CPUs is open."""
        self.open_pipes = 0
        """Number of open pipes of all kinds; while it is not 0, the tracer cannot be changed."""
        self._recorded: dict[TraceEvent, None] = {}
        """The events that are enabled in this trace array: keys in the order in which they were enabled."""
        self.pids = EventPids(self._pids_changed, memory=system.filter_words.memory)
        self._has_pids = False
        self._task_check: TaskCheck | None = None
        """Check by which guest code applies the lists of pids.

        None before it is needed, or if there is no memory for it.
        """
        self.max_latency_ns = 0
        """Value of tracing_max_latency in nanoseconds, as it was last written to the file."""
        self._stamp = system.clocks.converter(LOCAL)
        self._time_start = 0
        self._records_comm = True
        self._records_tgid = False
        self._past: PreviousBootNames | None = None
        """Events and task names for printing an earlier kernel's records.

        None if all records are printed with the events and task names of the running kernel.
        """
        try:
            self.snapshot = Snapshot(self)
        except KernelError:
            self.release()
            raise

    # -- recording

    def record(
        self, event: TraceEvent, payload: bytes, hit: ProbeHit, place: RingBuffer | None = None, /
    ) -> None:
        """Write an event's entry, unless the lists of pids exclude the task; see Recorder.record()."""
        if self._ignores(event, payload):
            return
        if self.record_at(event.id, payload, hit, place) and self.options.flags & _STACKS:
            self._record_stacks(hit, place)

    def triggers_ignore(self, event: TraceEvent, payload: bytes, /) -> bool:
        """Return True if triggers must not run, because the lists of pids exclude the task; see Recorder."""
        is_asked = event.is_tracepoint or InterfaceRule.PIDS_BEFORE_TRIGGERS in self.system.interface
        return is_asked and self._ignores(event, payload)

    def _ignores(self, event: TraceEvent, payload: bytes) -> bool:
        """Return True if the lists of pids exclude the current task, so that the event is not recorded."""
        pids = self.pids
        return pids.is_active and pids.is_filtered(event, payload, self.system.tasks.pid())

    def _record_stacks(self, hit: ProbeHit, place: RingBuffer | None) -> None:
        """Record the call chains of a hit that the options stacktrace and userstacktrace select.

        `place`: see record_at(). The option userstacktrace has no effect for a hit in an NMI.
        Mirrors: kernel/trace/trace.c:trace_buffer_unlock_commit_regs, ftrace_trace_userstack (v6.1).
        """
        system = self.system
        flags = self.options.flags
        if TraceOption.STACKTRACE in flags:
            self.record_stack(hit, place)
        if TraceOption.USERSTACKTRACE in flags and not hit.context[0] & EntryFlag.NMI:
            tasks = system.tasks
            word = system.arch.word_size
            callers = system.stack.user_callers(tasks.current())
            self.record_at(EntryType.USER_STACK, user_stack_entry(tasks.pid(), callers, word), hit, place)

    def record_at(self, kind: int, payload: bytes, hit: ProbeHit, place: RingBuffer | None = None, /) -> bool:
        """Write a record of type `kind` for a hit, without filters or call chains.

        `place`: ring buffer to which the record is written; by default that of the current CPU.
        Return False if the record was not written.
        """
        cpu, pid, comm, flags, preempt_count = hit.origin()
        return self.append(
            kind,
            payload,
            cpu=cpu,
            pid=pid,
            comm=comm.decode("utf-8", "surrogateescape"),
            flags=flags,
            preempt_count=preempt_count,
            timestamp_ns=self.system.now_ns(),
            place=place,
        )

    def append(
        self,
        kind: int,
        payload: bytes,
        *,
        cpu: int,
        pid: int,
        comm: str | None = None,
        flags: int = 0,
        preempt_count: int = 0,
        timestamp_ns: int,
        place: RingBuffer | None = None,
    ) -> bool:
        """Append a record to the buffer of `cpu`, or to `place` if `place` is given.

        Return False if tracing is off or the buffer has no room. `kind`, `flags`, `preempt_count` and `pid`
        are the common fields, and `payload` is the data after them. If `comm` is given, it is saved as the
        name of `pid`. `timestamp_ns`: time of the machine's clock; it is converted to the trace clock's
        units.
        """
        stamp = self._stamp
        header = TRACE_ENTRY.pack(kind, flags, preempt_count, pid)
        when = timestamp_ns if stamp is None else stamp(timestamp_ns)
        buffer = self.buffers[cpu] if place is None else place
        if not buffer.write(header + payload, when):
            return False
        if comm is not None and self._records_comm:
            self.system.cmdlines.save(pid, comm)
        if comm is not None and self._records_tgid:
            # Each task of the guest is a thread group of its own.
            self.system.cmdlines.save_tgid(pid, pid)
        if self.listeners:
            self.notify()
        return True

    def notify_rewired(self) -> None:
        """Recompile guest code of events and tracer after a change of buffers, clock, options or pid lists.

        Until this method is called, guest code writes to the buffers for which it was compiled.
        """
        for event in self._recorded:
            event.changed()
        self.rewire_tracer()

    def _pids_changed(self) -> None:
        """Recompile guest code if the lists of pids became empty or non-empty.

        Guest code does not depend on the lists' members.
        """
        if self._task_check is not None:
            self._task_check.forget()
        if self.pids.is_active is not self._has_pids:
            self._has_pids = self.pids.is_active
            self.notify_rewired()

    def rewire_tracer(self) -> None:
        """Recompile guest code of the current tracer, but not that of events."""
        self._tracers[self.current_tracer].rewired()

    def entry(self, event: TraceEvent, payload: bytes, hit: ProbeHit, /) -> RawEntry:
        """Return the entry that record() would write, for filters and triggers; see Recorder.entry()."""
        cpu, pid, comm, flags, preempt_count = hit.origin()
        header = TRACE_ENTRY.pack(event.id, flags, preempt_count, pid)
        return RawEntry(header + payload, cpu, comm, partial(self._string_at, hit))

    def _string_at(self, hit: ProbeHit, address: int, is_user: bool) -> bytes | None:
        """Read the string at a user or kernel address; return None if it cannot be read.

        Mirrors: mm/maccess.c:strncpy_from_user_nofault, strncpy_from_kernel_nofault (v6.1).
        """
        if (address < self.system.arch.task_size) is not is_user:
            return None
        return read_string(hit.read, address, POINTED_STRING_MAX)

    def reserve(self) -> RingBuffer | None:
        """Return the current CPU's buffer, or None while recording is disabled; see Recorder.reserve()."""
        buffer = self.buffers[self.system.tasks.cpu()]
        return None if buffer.disabled else buffer

    def target(self) -> RecordTarget | None:
        """Return the buffers to which guest code may record an event; see Recorder.target().

        Return None if the host must write the record. This is the case if ring_target() returns None, if an
        option adds call chains, or if there is no memory for the check of the lists of pids.
        """
        if self.options.flags & _STACKS or (self.pids.is_active and self.task_check() is None):
            return None
        return self.ring_target()

    def task_check(self) -> TaskCheck | None:
        """Return the check by which guest code applies the lists of pids; see Recorder.

        Return None if both lists are empty, or if there is no memory for the check.
        """
        if not self.pids.is_active:
            return None
        if self._task_check is None:
            self._task_check = self.system.memory.task_check(self.pids.ignores)
        return self._task_check

    def release(self) -> None:
        super().release()
        if self._task_check is not None:
            self._task_check.release()

    def ring_target(self) -> RecordTarget | None:
        """Return the buffers to which guest code may append records, as append() does on the host.

        Return None if the host must append them. This is the case if the trace clock does not count
        nanoseconds, if the host sets the guest's clock, or if option record-tgid is on.
        """
        memory = self.system.memory
        if not self.clock.in_ns or self._records_tgid or not memory.can_tell_time:
            return None
        buffers = self.buffers
        return RecordTarget(
            buffers[0].place.control_at, self._records_comm, memory.room_maker(buffers), self.order
        )

    def callers(self, hit: ProbeHit) -> Sequence[int]:
        """Return the call chain of a hit: the hit's address, then return addresses, innermost first."""
        if hit.chain is not None:
            return hit.chain
        chain = self.system.stack.callers(hit.regs)
        if hit.has_several:
            hit.chain = chain
        return chain

    def record_stack(self, hit: ProbeHit, place: RingBuffer | None = None) -> None:
        """Record a STACK entry with the call chain of a hit.

        `place`: ring buffer to which the entry is written; by default that of the current CPU.
        """
        entry = stack_entry(self.callers(hit), self.system.arch.word_size)
        self.record_at(EntryType.STACK, entry, hit, place)

    def event_switched(self, event: TraceEvent, /, *, enabled: bool) -> None:
        """Note that this trace array has enabled or disabled an event; see Recorder.event_switched().

        Task names are saved while any trace array has an event enabled; see SavedCmdlines.recorders.
        """
        self.system.cmdlines.recorders += 1 if enabled else -1
        if enabled:
            self._recorded[event] = None
        else:
            self._recorded.pop(event, None)

    def event_removed(self, event: TraceEvent, /) -> None:
        """Empty the buffers, because the entries of a removed event cannot be printed; see Recorder."""
        self._recorded.pop(event, None)
        self.snapshot.clear()
        self.clear_trace()

    def past(self) -> PreviousBootRecords:
        """Return the buffers with their records, for take_records() of another kernel's trace array."""
        return PreviousBootRecords(
            self.buffers,
            self.snapshot.buffers,
            self.snapshot.is_allocated,
            self._time_start,
            self.max_latency_ns,
            self._past,
        )

    def memory_for(self, past: PreviousBootRecords) -> list[RingMemory]:
        """Return memory for each buffer of `past`, to which take_records() moves the buffer.

        The list begins with the memory for `past.buffers`; that for `past.aside` follows.

        For a buffer of `past` that has the shape of this array's buffer, the memory is that of this array's
        buffer. Otherwise this array's buffer is freed and its records are lost, and new memory is
        allocated.
        Raises: KernelError ENOMEM (nothing is changed).
        """
        own = [*self.buffers, *self.snapshot.buffers]
        shapes = [buffer.shape for buffer in (*past.buffers, *past.aside)]
        changed = [at for at, shape in enumerate(shapes) if own[at].shape != shape]
        new = self.exchange([own[at] for at in changed], [shapes[at] for at in changed])
        memories = [buffer.place for buffer in own]
        for at, memory in zip(changed, new, strict=True):
            memories[at] = memory
        return memories

    def take_records(self, past: PreviousBootRecords, memory: list[RingMemory]) -> None:
        """Replace the buffers by the buffers and records of another kernel's trace array.

        `memory` is the result of memory_for(past).
        """
        unused = iter(memory)
        for mine, theirs in ((self.buffers, past.buffers), (self.snapshot.buffers, past.aside)):
            for cpu, buffer in enumerate(theirs):
                buffer.resize(mine[cpu].place.moved_to(next(unused)), buffer.nr_pages)
                mine[cpu].retire()
                buffer.held = 0
                mine[cpu] = buffer
        self.snapshot.is_allocated = past.has_snapshot
        self._time_start = past.time_start
        self.max_latency_ns = past.max_latency_ns
        self._past = past.names
        self.note_sizes()
        self.apply_switches()
        self.notify_rewired()

    def mark_reboot(self) -> None:
        """Append the marker REBOOT_MARK if the buffers hold records.

        These records are of the kernel before the reboot.
        """
        if self.written:
            # The mark is written even if recording is switched off.
            self.buffers[0].disabled = False
            entry = TRACE_ENTRY.pack(EntryType.PRINT, 0, 0, 0)
            self.buffers[0].write(entry + self._marker(REBOOT_MARK), self.now())
            self.apply_switches()

    def write_marker(self, data: bytes) -> int:
        """Execute one write(2) to trace_marker: record a PRINT entry of the current task.

        Return the number of bytes of `data` that were recorded; the rest needs another write(2).
        Raises: KernelError EINVAL (option markers is off), EBADF (tracing is off), ENODEV (no trace array
        records the markers).
        Mirrors: kernel/trace/trace.c:tracing_mark_write (v6.1).
        """
        self._check_markers()
        return self._to_targets(TraceArray._write_text, data) if data else 0

    def _to_targets(self, write: Callable[[TraceArray, bytes], int], data: bytes) -> int:
        """Write a marker to each trace array of marker_targets() by calling `write`.

        `data`: the bytes that were written to the marker file. Return the number of bytes that the last
        call of `write` took.
        Raises: KernelError ENODEV (no trace array records the markers), the error of the first call that
        fails.
        """
        taken = [write(array, data) for array in self.marker_targets()]
        if not taken:
            raise KernelError(errno.ENODEV, "no trace array has the option copy_trace_marker; set it in one")
        return taken[-1]

    def _write_text(self, data: bytes) -> int:
        limit = MARKER_LIMIT
        if InterfaceRule.LONG_MARKERS in self.system.interface:
            limit = MAX_DATA_SIZE - COMMON_SIZE - self.system.arch.word_size - _NEWLINE_SIZE
        text = data[:limit]
        system = self.system
        recorded = system.markers.written(self, text, system.current_ctx) if self._tracing_on else None
        self._write_mark(EntryType.PRINT, self._marker(text))
        if recorded is not None:
            recorded()
        return len(text)

    def _marker(self, text: bytes) -> bytes:
        """Return the payload of a PRINT entry with the marker's text."""
        system = self.system
        is_exact = InterfaceRule.MARKERS_EXACT in system.interface
        return print_entry(text, system.markers.marker_ip, system.arch.word_size, is_exact=is_exact)

    def write_raw_marker(self, data: bytes) -> int:
        """Execute one write(2) to trace_marker_raw: record a RAW_DATA entry of the current task.

        `data`: a u32 that the writer chooses as the marker's id, and the bytes after it. Return the number
        of bytes taken, which is the size of the recorded data.
        Raises: KernelError EINVAL (option markers is off, or a wrong size), EBADF (tracing is off), ENODEV
        (no trace array records the markers).
        Mirrors: kernel/trace/trace.c:tracing_mark_raw_write (v6.1).
        """
        self._check_markers()
        return self._to_targets(TraceArray._write_raw, data)

    def _write_raw(self, data: bytes) -> int:
        interface = self.system.interface
        is_exact = InterfaceRule.MARKERS_EXACT in interface
        limit = RAW_MARKER_LIMIT
        if InterfaceRule.LONG_MARKERS in interface:
            # Linux: before 6.17, the size of the record counts the id twice.
            limit = MAX_DATA_SIZE - COMMON_SIZE - (0 if is_exact else _ID_SIZE)
        if not _ID_SIZE <= len(data) <= limit:
            raise KernelError(errno.EINVAL, f"raw marker: {len(data)} bytes; write {_ID_SIZE} to {limit}")
        if limit == RAW_MARKER_LIMIT:
            # Linux: data longer than MARKER_LIMIT is accepted, but only its beginning is recorded.
            data = data[:MARKER_LIMIT]
        self._write_mark(EntryType.RAW_DATA, data if is_exact else raw_data_entry(data))
        return len(data)

    def _check_markers(self) -> None:
        if not self.options.flags & TraceOption.MARKERS:
            raise KernelError(errno.EINVAL, "trace_marker: option markers is off; switch it on")

    def _write_mark(self, kind: EntryType, body: bytes) -> None:
        task = self.system.tasks.context()
        # Linux: names are saved at task switches, and only while an event is enabled or a tracer runs.
        is_named = self.system.cmdlines.recorders or self.current_tracer != NOP_TRACER
        written = self.append(
            kind,
            body,
            cpu=task.cpu,
            pid=task.pid,
            comm=task.comm if is_named else None,
            preempt_count=self.system.marker_preempt_count,
            timestamp_ns=self.system.now_ns(),
        )
        if not written:
            raise KernelError(errno.EBADF, "trace_marker: tracing is off; write 1 to tracing_on")

    # -- the trace file

    def trace_text(self, cpu: int | None = None) -> str:
        """Return the whole text of the trace file of one CPU, or of all CPUs; see trace_records()."""
        return "".join(self.trace_records(cpu))

    def snapshot_text(self, cpu: int | None = None) -> str:
        """Return the whole text of the snapshot file of one CPU, or of all CPUs; see snapshot_records()."""
        return "".join(self.snapshot_records(cpu))

    def trace_records(
        self,
        cpu: int | None = None,
        buffers: Sequence[RingBuffer] | None = None,
        *,
        is_followed: bool = False,
    ) -> Iterator[str]:
        """Yield the header and then the lines of the trace file of one CPU, or of all CPUs, sorted by time.

        No event is consumed. The lines show the events that the buffers hold at the beginning. A note
        replaces events that are overwritten before they are shown. The lines end if a buffer is emptied. The
        header always counts the events of all CPUs. `buffers` defaults to the buffers of the trace array.
        `is_followed`: after these lines, yield END (see control_lock.py), then the lines of later events and
        END again, and so on.
        """
        buffers = self.buffers if buffers is None else buffers
        flags = self.options.flags
        stats = [buffer.stats() for buffer in buffers]
        entries = sum(counters.entries for counters in stats)
        overruns = sum(counters.overrun for counters in stats)
        header = TraceHeader(
            columns=self._columns,
            tracer=self.current_tracer,
            entries=entries,
            total=entries + overruns,
            cpus=self.system.cpus,
            release=self.system.release,
            tracer_options=self.system.tracer_options,
        )
        cursors = {number: RingCursor(buffers[number]) for number in self._cpus(cpu)}

        def later() -> Iterator[TimedRecord]:
            for cursor in cursors.values():
                cursor.extend()
            return timed_records(cursors)

        lines = trace_lines(
            timed_records(cursors),
            self.formatter(),
            self.graph_printer(),
            annotate=overruns > 0,
            later=later if is_followed else None,
        )
        yield header_text(header, flags)
        # After a buffer was emptied, the names of events may be invalid, so no more lines are printed.
        while not any(cursor.is_stale for cursor in cursors.values()):
            line = next(lines, None)
            if line is None:
                return
            yield line

    def snapshot_records(self, cpu: int | None = None) -> Iterator[str]:
        """Yield the snapshot file's text in parts: the snapshot's events, or a help text if there are none.

        The help text lists the commands that may be written to the file.
        """
        buffers = self.snapshot.buffers
        if any(len(buffers[number]) for number in self._cpus(cpu)):
            yield from self.trace_records(cpu, buffers)
        else:
            yield self.snapshot.usage(self.current_tracer, cpu)

    def graph_printer(self) -> GraphPrinter | None:
        """Return a new printer of call graphs if the current tracer is function_graph, else None."""
        if self.current_tracer != graph_output.NAME:
            return None
        return GraphPrinter(self.system.cpus, self.system.tracer_options)

    def formatter(self) -> LineFormatter:
        """Return a printer of records as lines of text, which uses the options that are set now."""
        system = self.system
        flags = self.options.flags
        past = self._past
        by_id = system.events.by_id
        return LineFormatter(
            flags,
            in_ns=self.clock.in_ns,
            find_event=by_id if past is None else partial(past.find_event, by_id),
            cmdlines=system.cmdlines if past is None else CombinedTaskNames(past.cmdlines, system.cmdlines),
            style=AddressStyle(
                system.symbols,
                word_size=system.arch.word_size,
                sym_offset=TraceOption.SYM_OFFSET in flags,
                sym_addr=TraceOption.SYM_ADDR in flags,
                print_parent=TraceOption.PRINT_PARENT in flags,
                arguments=None if system.function_args is None else system.function_args.text,
            ),
            time_start=self._time_start,
            columns=self._columns,
            limit=LONG_SEQ_SIZE if InterfaceRule.LONG_LINES in system.interface else SEQ_SIZE,
            shows_symbols=InterfaceRule.FIELDS_AS_SYMBOLS in system.interface,
        )

    def clear_trace(self, cpu: int | None = None) -> None:
        """Forget the events of one CPU or of all, as opening the trace file with O_TRUNC does.

        Mirrors: kernel/trace/trace.c:tracing_reset_cpu, tracing_reset_online_cpus (v6.1).
        """
        for number in self._cpus(cpu):
            self.buffers[number].reset()
        if cpu is None:
            self._time_start = self.now()
            if not any(len(buffer) for buffer in self.snapshot.buffers):
                self._past = None

    def stats_text(self, cpu: int) -> str:
        """Return the text of per_cpu/cpuN/stats. Mirrors: kernel/trace/trace.c:tracing_stats_read (v6.1)."""
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
        """Return the current time in the units of the trace clock."""
        now = self.system.now_ns()
        return now if self._stamp is None else self._stamp(now)

    # -- controls

    @property
    def pauses_for_readers(self) -> bool:
        """Whether option pause-on-trace is on: recording stops while the trace file is open for reading."""
        return TraceOption.PAUSE_ON_TRACE in self.options.flags

    def tracers(self) -> Collection[str]:
        """Return the names that current_tracer accepts."""
        return tuple(reversed(self._tracers))

    def register_tracer(self, name: str, tracer: Tracer) -> None:
        """Make `name` select `tracer` in current_tracer.

        Mirrors: kernel/trace/trace.c:register_tracer (v6.1).
        """
        self._tracers[name] = tracer

    def _tracer_option_changed(self, name: str) -> None:
        self._tracers[self.current_tracer].option_changed(name)

    def write_tracing_on(self, number: int) -> None:
        """Execute a write to tracing_on: switch recording off (0) or on (not 0).

        If recording was off and is on now, notify the tracer.

        Mirrors: kernel/trace/trace.c:rb_simple_write (v6.1).
        """
        was_on = self.tracing_on
        self.set_tracing_on(number != 0)
        if self.tracing_on and not was_on:
            self._tracers[self.current_tracer].switched_on()

    def set_tracer(self, name: str) -> None:
        """Switch to the tracer `name` and expand the buffers. The records of the previous tracer are lost.

        If `name` is the current tracer already, only expand the buffers.

        Raises: KernelError EINVAL (an unknown tracer), EBUSY (a pipe is open), or as Tracer.start() (`nop` is
        the current tracer then).
        Mirrors: kernel/trace/trace.c:tracing_set_tracer (v6.1).
        """
        self.system.lock.assert_held()
        self.expand()
        if name not in self._tracers:
            raise KernelError(errno.EINVAL, f"{name!r}: no such tracer; see available_tracers")
        if name == self.current_tracer:
            return
        if self.open_pipes:
            raise KernelError(errno.EBUSY, "current_tracer: a trace_pipe is open; close it first")
        self._tracers[self.current_tracer].stop()
        self.current_tracer = NOP_TRACER
        self.clear_trace()
        self._tracers[name].start()
        self.current_tracer = name

    def set_clock(self, name: str) -> None:
        """Switch to the clock `name`, and clear the buffers: times of different clocks cannot be compared.

        Raises: KernelError EINVAL (an unknown clock). Mirrors: kernel/trace/trace.c:tracing_set_clock (v6.1).
        """
        clock = find_clock(name)
        if clock is None:
            raise KernelError(errno.EINVAL, f"{name!r}: no such clock; see trace_clock")
        self.clock = clock
        self._stamp = self.system.clocks.converter(clock)
        self.snapshot.clear()
        self.clear_trace()
        self.notify_rewired()

    def clock_text(self) -> str:
        """Return the text of the trace_clock file."""
        return clocks_text(self.clock)

    def set_subbuf_size(self, size_kb: int) -> None:
        """Set the size of sub-buffers in KiB, rounded up to a power of two.

        If the size changes, all records are removed. The capacity of the buffers in bytes stays the same,
        rounded up to whole sub-buffers.
        Deviates: in Linux the counters in `stats` still count the removed records.
        Raises: KernelError EINVAL (0, or more than 512), EBUSY (a trace file is open for reading), ENOMEM.
        Mirrors: kernel/trace/trace.c:buffer_subbuf_size_write (v6.12).
        """
        self.system.lock.assert_held()
        order = (-(-(size_kb << 10) // PAGE_SIZE) - 1).bit_length()
        if not size_kb or order > MAX_ORDER:
            raise KernelError(
                errno.EINVAL, f"buffer_subbuf_size_kb: {size_kb}; write 1 to {PAGE_SIZE >> 10 << MAX_ORDER}"
            )
        if order != self.order:
            self._set_order(order)

    def _set_order(self, order: int) -> None:
        """Replace all buffers by empty ones of about the same capacity; `order`: order of their sub-buffers.

        Mirrors: kernel/trace/ring_buffer.c:ring_buffer_subbuf_order_set (v6.12).
        """
        snapshot = self.snapshot
        old = [*self.buffers, *(snapshot.buffers if snapshot.is_allocated else ())]
        check_resizable(old, errno.EBUSY)
        new = self.reshape(old, [RingShape(pages_for(buffer.size, order), order) for buffer in old])
        self.buffers[:] = new[: self.cpus]
        if snapshot.is_allocated:
            snapshot.replace(new[self.cpus :])
        self.apply_switches()
        self.notify_rewired()
        self.notify()

    def set_buffer_percent(self, percent: int) -> None:
        """Set buffer_percent: how full a CPU's buffer must be before poll(2) reports the CPU's pipe as ready.

        Raises: KernelError EINVAL (more than 100).
        """
        if percent > 100:
            raise KernelError(errno.EINVAL, f"buffer_percent: {percent} is more than 100")
        self.buffer_percent = percent

    def take_over(self, flags: TraceOption) -> None:
        """Replace this array's options by `flags`, the options of another trace array, and apply them."""
        self.options.flags = flags
        self._options_changed()

    def _options_changed(self) -> None:
        flags = self.options.flags
        self._records_comm = TraceOption.RECORD_CMD in flags
        self._records_tgid = TraceOption.RECORD_TGID in flags
        self._overwrite = TraceOption.OVERWRITE in flags
        self.apply_switches()
        self.notify_rewired()

    def free_buffer(self) -> None:
        """Shrink the buffers to the smallest size: execute the close of the file free_buffer.

        With option disable_on_free, recording is switched off first. If a trace file is open for reading, the
        buffers keep their size.
        Mirrors: kernel/trace/trace.c:tracing_free_buffer_release (v6.1).
        """
        if self.options.flags & TraceOption.STOP_ON_FREE:
            self.set_tracing_on(False)
        with suppress(KernelError):
            self._resize(0, None, errno.ENOMEM)
