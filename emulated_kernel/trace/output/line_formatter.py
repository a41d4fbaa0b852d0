"""Lines of the trace file: a record's context (task, CPU, flags, time) and its text.

Lines are str in which bytes that are not UTF-8 are surrogates. encode_text() converts lines to bytes.
Mirrors: kernel/trace/trace_output.c, kernel/trace/trace.c:print_trace_line (v6.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from struct import Struct

from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.output.event_fields import fields_text
from emulated_kernel.trace.output.options import TraceOption
from emulated_kernel.trace.ring.trace_clock import ns_to_usecs
from emulated_kernel.trace.ring.trace_entry import (
    BINARY_PRINTERS,
    ENTRY_PRINTERS,
    HEX_PRINTERS,
    RAW_PRINTERS,
    TRACE_ENTRY,
    AddressStyle,
    EntryFlag,
    EntryPrinter,
    EntryType,
    print_message,
    repeats,
)
from emulated_kernel.trace.text.chars import bytes_to_text
from emulated_kernel.trace.text.cmdlines import TaskNames
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.fast_named_tuple import NamedTuple

SEQ_SIZE = 4095
"""Maximum size in bytes of a line, and of a read of trace_pipe, before Linux 6.12."""
LONG_SEQ_SIZE = 8155
"""SEQ_SIZE of Linux 6.12. Mirrors: include/linux/trace_seq.h:TRACE_SEQ_BUFFER_SIZE (v6.12)."""
TOO_BIG = "[LINE TOO BIG]\n"
"""Text that is shown in place of a record's own text if the line would be too long."""

_WORDLESS = TraceOption.BIN | TraceOption.HEX | TraceOption.RAW
_BINARY_CONTEXT = Struct("<iiQ")
_MARKS = (
    (1_000_000_000, "$"),
    (100_000_000, "@"),
    (10_000_000, "*"),
    (1_000_000, "#"),
    (100_000, "!"),
    (10_000, "+"),
)


class TimedRecord(NamedTuple):
    """A record of a ring buffer, with its CPU and its time in clock units."""

    time_stamp: int
    cpu: int
    record: bytes
    follows_lost: bool = False
    """Whether the CPU's records just before this one were overwritten while the file was read."""


def encode_text(text: str) -> bytes:
    """Return the text of a trace file as bytes."""
    return text.encode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class FlagColumns:
    """The columns of a record's flags, which depend on the version of Linux."""

    has_migrate: bool = True
    """Whether there is a column for migrate-disable, and a letter for disabled softirqs, as in Linux 6.1."""
    has_lazy: bool = False
    """Whether lazy reschedules have letters (Linux 7.2)."""


DEFAULT_COLUMNS = FlagColumns()
"""The columns of a record's flags in Linux 6.1."""
_LAZY = EntryFlag.IRQS_NOSUPPORT
"""Flag of a pending lazy reschedule, in the versions of Linux that have lazy reschedules."""
_RESCHED = (".", "n", "p", "N", "l", "b", "L", "B")
"""Letters of need-resched. Index: the sum of 1 for NEED_RESCHED, 2 for PREEMPT_RESCHED, and 4 for _LAZY."""


def latency_flags(flags: int, preempt_count: int, columns: FlagColumns = DEFAULT_COLUMNS) -> str:
    """Return the characters of irqs-off, need-resched, hardirq/softirq, preempt-depth, migrate-disable.

    Mirrors: kernel/trace/trace_output.c:trace_print_lat_fmt (v6.1, v7.2).
    """
    bh_off = flags & EntryFlag.BH_OFF if columns.has_migrate else 0
    if flags & EntryFlag.IRQS_OFF:
        irqs = "D" if bh_off else "d"
    elif bh_off:
        irqs = "b"
    else:
        irqs = "X" if flags & EntryFlag.IRQS_NOSUPPORT and not columns.has_lazy else "."
    pending = bool(flags & EntryFlag.NEED_RESCHED) + 2 * bool(flags & EntryFlag.PREEMPT_RESCHED)
    lazy = 4 * bool(flags & _LAZY and columns.has_lazy)
    start = irqs + _RESCHED[pending + lazy] + _irq_level(flags)
    if not columns.has_migrate:
        return start + _digit(preempt_count)
    return start + _digit(preempt_count & 0xF) + _digit(preempt_count >> 4)


def _digit(depth: int) -> str:
    return f"{depth:x}" if depth else "."


def _irq_level(flags: int) -> str:
    hardirq = flags & EntryFlag.HARDIRQ
    if flags & EntryFlag.NMI:
        return "Z" if hardirq else "z"
    if flags & EntryFlag.SOFTIRQ:
        return "H" if hardirq else "s"
    return "h" if hardirq else "."


def find_mark(nanoseconds: int) -> str:
    """Return the character that marks a delay: from `+` for over 10 us to `$` for over 1 s, else a space.

    Mirrors: kernel/trace/trace_output.c:trace_find_mark (v6.1).
    """
    return next((mark for limit, mark in _MARKS if nanoseconds > limit), " ")


class LineFormatter:
    """Printer of records as lines, with the current options. A new object is created for each rendering."""

    def __init__(
        self,
        flags: TraceOption,
        *,
        in_ns: bool,
        find_event: Callable[[int], TraceEvent | None],
        cmdlines: TaskNames,
        style: AddressStyle,
        time_start: int = 0,
        shows_symbols: bool = False,
        limit: int = SEQ_SIZE,
        columns: FlagColumns = DEFAULT_COLUMNS,
    ) -> None:
        """Create a printer of lines in the format that the trace options `flags` select.

        `find_event` maps the type of a record to its event, or to None if no event has the type. `in_ns`:
        whether the trace clock counts nanoseconds; otherwise times are shown as plain numbers. `time_start`:
        time from which times are counted with the option latency-format. `shows_symbols`: whether the option
        fields shows words of 64 bits as symbols; see fields_text(). `limit`: maximum size of a line in bytes.
        `columns` describes the columns of common_flags. `cmdlines` knows the tasks' names.
        """
        self.flags = flags
        self._in_ns = in_ns
        self._event = find_event
        self.cmdlines = cmdlines
        self.style = style
        self._time_start = time_start
        self._shows_symbols = shows_symbols
        self.limit = limit
        self.columns = columns
        self._tasks: dict[tuple[int, int, int, int], str] = {}
        self._print = self._printer()
        wanted = TraceOption.PRINTK | TraceOption.PRINTK_MSGONLY
        self._message_only = flags & wanted == wanted

    def line(self, entry: TimedRecord, next_time: int, index: int) -> str:
        """Return the line of a record.

        `next_time`: time of the next record in the file; for the last record, and in trace_pipe, the record's
        own time. `index`: number of the record, from 0 in a trace file and from 1 in a read of trace_pipe.
        """
        if self._message_only and TRACE_ENTRY.unpack_from(entry.record)[0] == EntryType.PRINT:
            return print_message(entry.record[TRACE_ENTRY.size :], self.style)
        return self._print(entry, next_time, index)

    def comment(self, entry: TimedRecord) -> str:
        """Return the text of a record for a comment in a call graph, without task, CPU and time."""
        if TRACE_ENTRY.unpack_from(entry.record)[0] == EntryType.PRINT:
            return print_message(entry.record[TRACE_ENTRY.size :], self.style)
        return self._body(entry)

    @property
    def annotates(self) -> bool:
        """Whether comments such as "CPU 1 buffer started" may appear between the lines."""
        return TraceOption.ANNOTATE in self.flags and not self.flags & _WORDLESS

    def _printer(self) -> Callable[[TimedRecord, int, int], str]:
        flags = self.flags
        if flags & TraceOption.BIN:
            return self._wordless(BINARY_PRINTERS, _binary_context)
        if flags & TraceOption.HEX:
            return self._wordless(HEX_PRINTERS, _hex_context, "\n")
        if flags & TraceOption.RAW:
            return self._wordless(RAW_PRINTERS, _raw_context)
        if not flags & TraceOption.CONTEXT_INFO:
            return lambda entry, _next_time, _index: self._clip("", self._body(entry))
        return self._latency_line if flags & TraceOption.LATENCY_FMT else self._default_line

    # -- the text after the context

    def _body(self, entry: TimedRecord) -> str:
        kind = entry.record[0] | entry.record[1] << 8
        payload = entry.record[TRACE_ENTRY.size :]
        if kind == EntryType.FUNC_REPEATS:
            return self._repeats(payload, entry.time_stamp)
        event = self._event(kind)
        style = self.style
        if TraceOption.FIELDS in self.flags:
            # Linux: this option finds no event for entries that no trace event defines, such as PRINT.
            if event is None:
                return f"UNKNOWN TYPE {kind}\n"
            return fields_text(event, payload, style.symbols, shows_symbols=self._shows_symbols)
        if event is not None:
            verbose = TraceOption.VERBOSE in self.flags
            return event.print_line(payload, style.symbols, sym_addr=style.sym_addr, verbose=verbose) + "\n"
        if printer := ENTRY_PRINTERS.get(kind):
            return printer(payload, self.style)
        return f"Unknown type {kind}\n"

    def _repeats(self, payload: bytes, now: int) -> str:
        """Return the text of a FUNC_REPEATS record. `now`: time of the record.

        Mirrors: kernel/trace/trace_output.c:trace_func_repeats_print, trace_print_time (v6.1).
        """
        count, ago = repeats(payload, self.style)
        last = now - ago
        seconds, usecs = divmod(ns_to_usecs(last), 1_000_000)
        when = f"{seconds:5d}.{usecs:06d}" if self._in_ns else f"{last:12d}"
        call = ENTRY_PRINTERS[EntryType.FN](payload, self.style).rstrip("\n")
        return f"{call} (repeats: {count}, last_ts: {when})\n"

    def _clip(self, context: str, body: str) -> str:
        line = context + body
        if len(line) * 4 > self.limit and len(encode_text(line)) > self.limit:
            # Deviates: Linux keeps the arguments that fit before the text [LINE TOO BIG].
            return context + TOO_BIG
        return line

    # -- the context: task, CPU, flags and time

    def _default_line(self, entry: TimedRecord, _next_time: int, _index: int) -> str:
        _, flags, preempt, pid = TRACE_ENTRY.unpack_from(entry.record)
        key = (pid, entry.cpu, flags, preempt)
        task = self._tasks.get(key)
        if task is None:
            task = self._task(*key)
            self._tasks[key] = task
        if self._in_ns:
            seconds, usecs = divmod(ns_to_usecs(entry.time_stamp), 1_000_000)
            context = f"{task} {seconds:5d}.{usecs:06d}: "
        else:
            context = f"{task} {entry.time_stamp:12d}: "
        return self._clip(context, self._body(entry))

    def _task(self, pid: int, cpu: int, flags: int, preempt: int) -> str:
        tgid = ""
        irqs = ""
        if self.flags & TraceOption.RECORD_TGID:
            number = self.cmdlines.find_tgid(pid)
            tgid = f"({number:7d}) " if number else "(-------) "
        if self.flags & TraceOption.IRQ_INFO:
            irqs = latency_flags(flags, preempt, self.columns)
        return f"{self.cmdlines.find(pid):>16}-{pid:<7d} {tgid}[{cpu:03d}] {irqs}"

    def _latency_line(self, entry: TimedRecord, next_time: int, index: int) -> str:
        _, flags, preempt, pid = TRACE_ENTRY.unpack_from(entry.record)
        comm = self.cmdlines.find(pid)
        if self.flags & TraceOption.VERBOSE:
            task = f"{comm:>16} {pid:7d} {entry.cpu:3d} {flags} {preempt & 0xF:08x} {index:08x} "
            when = self._verbose_time(entry.time_stamp, next_time)
        else:
            task = f"{comm[:8]:>8}-{pid:<7d} {entry.cpu:3d}{latency_flags(flags, preempt, self.columns)}"
            when = self._latency_time(entry.time_stamp, next_time)
        return self._clip(f"{task}{when}: ", self._body(entry))

    def _latency_time(self, now: int, next_time: int) -> str:
        since = now - self._time_start
        if not self._in_ns:
            return f" {since:4d}"
        return f" {ns_to_usecs(since):4d}us{find_mark(1000 * ns_to_usecs(next_time - now))}"

    def _verbose_time(self, now: int, next_time: int) -> str:
        since = now - self._time_start
        delay = next_time - now
        if not self._in_ns:
            return f"[{now:016x}] {since} (+{delay})"
        ms, us = divmod(ns_to_usecs(since), 1000)
        delay_ms, delay_us = divmod(ns_to_usecs(delay), 1000)
        return f"[{ns_to_usecs(now):08x}] {ms}.{us:03d}ms (+{delay_ms}.{delay_us:03d}ms)"

    # -- the formats bin, hex and raw, in which events have no text of their own

    def _wordless(
        self,
        printers: Mapping[int, EntryPrinter],
        context: Callable[[int, TimedRecord], str],
        end: str = "",
    ) -> Callable[[TimedRecord, int, int], str]:
        """Return a function that prints a record in the format of option bin, hex or raw.

        It has the parameters of line().

        `printers`: entry type -> printer; a record of any other type is printed as `type: N`. `context`
        returns the text before a record; its arguments are a pid and the record. `end` is appended to each
        record.
        Mirrors: kernel/trace/trace_output.c:trace_nop_print (v6.1).
        """
        has_context = TraceOption.CONTEXT_INFO in self.flags

        def line(entry: TimedRecord, _next_time: int, _index: int) -> str:
            kind, _, _, pid = TRACE_ENTRY.unpack_from(entry.record)
            printer = printers.get(kind)
            body = printer(entry.record[TRACE_ENTRY.size :], self.style) if printer else f"type: {kind}\n"
            return (context(pid, entry) if has_context else "") + body + end

        return line


def _raw_context(pid: int, entry: TimedRecord) -> str:
    return f"{pid} {entry.cpu} {entry.time_stamp} "


def _binary_context(pid: int, entry: TimedRecord) -> str:
    return bytes_to_text(_BINARY_CONTEXT.pack(pid, entry.cpu, entry.time_stamp))


def _hex_context(pid: int, entry: TimedRecord) -> str:
    return f"{pid & 0xFFFFFFFF:08x} {entry.cpu:08x} {entry.time_stamp:016x} "
