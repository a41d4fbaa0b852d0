"""Records of the function_graph tracer, and their text: a tree of calls with durations.

Mirrors: kernel/trace/trace_functions_graph.c (v6.1).
"""

from __future__ import annotations

from struct import Struct

from emulated_kernel.trace.output.function_args import COUNT
from emulated_kernel.trace.output.line_formatter import LineFormatter, TimedRecord, find_mark, latency_flags
from emulated_kernel.trace.output.options import TraceOption
from emulated_kernel.trace.output.tracer_options import GraphOption, TracerOptions
from emulated_kernel.trace.ring.trace_entry import TRACE_ENTRY, EntryType
from emulated_kernel.trace.symbols import print_ip
from emulated_kernel.util.fast_dataclass import dataclass, field

NAME = "function_graph"
"""Name of the function_graph tracer in current_tracer."""
INDENT = 2
"""Number of spaces by which each level of calls is indented."""
MAX_DEPTH = 50
"""Maximum depth of calls that are matched with their returns.

Mirrors: include/linux/ftrace.h:FTRACE_RETFUNC_DEPTH (v6.1).
"""
_PROCINFO_LENGTH = 14
_NO_TIME = "              |  "
_RULE = " ------------------------------------------\n"
_COMM_SHOWN = 7


class GraphRecords:
    """Formats of struct ftrace_graph_ent_entry and ftrace_graph_ret_entry, without the common fields."""

    def __init__(self, word_size: int, *, has_args: bool = False) -> None:
        """Create the formats for words of `word_size` bytes.

        `has_args`: whether arguments can follow a call's record. If so, the depth in the record takes a word;
        otherwise it takes 4 bytes.
        """
        word = "Q" if word_size == 8 else "I"
        self.depth_size = word_size if has_args else 4
        self.entered = Struct(f"<{word}i{self.depth_size - 4}x")
        """Format of a call's record: func, depth."""
        self.arguments = Struct(f"<{COUNT}{word}")
        """Format of the arguments after a call's record."""
        self.returned = Struct(f"<{word}iIQQ")
        """Format of a return's record: func, depth, overrun, calltime, rettime. Times are in nanoseconds."""


def duration_text(nanoseconds: int) -> str:
    """Return a duration as text: microseconds with at most seven digits.

    Mirrors: kernel/trace/trace_functions_graph.c:trace_print_graph_duration (v6.1).
    """
    usecs, rest = divmod(nanoseconds, 1000)
    text = str(usecs)
    if len(text) < 7:
        text += "." + f"{rest:03d}"[: 7 - len(text)]
    return f"{text} us " + " " * (8 - len(text))


@dataclass
class _CpuState:
    """State of a CPU's text after its last record.

    Mirrors: kernel/trace/trace_functions_graph.c:struct fgraph_cpu_data (v6.1).
    """

    last_pid: int = -1
    depth: int = 0
    functions: dict[int, int] = field(default_factory=dict)
    """Depth -> address of the function that was entered at this depth and has not returned yet."""
    was_leaf: bool = False
    """Whether the line of the last call also shows its return, so that the next return prints nothing."""


_LATENCY_LEGEND = (
    "  _-----=> irqs-off        ",
    " / _----=> need-resched    ",
    "| / _---=> hardirq/softirq ",
    "|| / _--=> preempt-depth   ",
    "||| /                      ",
)
_LATENCY_INDENTS = {GraphOption.ABSTIME: 16, GraphOption.CPU: 4, GraphOption.PROC: 17}


def header(options: TracerOptions, *, latency: bool) -> str:
    """Return the comment lines with the titles of the columns.

    `latency`: whether the option latency-format is on.
    Mirrors: kernel/trace/trace_functions_graph.c:__print_graph_headers_flags, print_lat_header (v6.1).
    """
    indent = sum(width for option, width in _LATENCY_INDENTS.items() if options.is_on(option))
    legend = "".join(f"#{'':{indent}}{line}\n" for line in _LATENCY_LEGEND) if latency else ""
    columns = (
        (options.is_on(GraphOption.ABSTIME), "     TIME       ", "      |         "),
        (options.is_on(GraphOption.CPU), " CPU", " |  "),
        (options.is_on(GraphOption.PROC), "  TASK/PID       ", "   |    |        "),
        (latency, "||||   ", "||||   "),
        (options.is_on(GraphOption.DURATION), "  DURATION   ", "   |   |      "),
        (True, "               FUNCTION CALLS", "               |   |   |   |"),
    )
    titles = "".join(title for shown, title, _ in columns if shown)
    marks = "".join(mark for shown, _, mark in columns if shown)
    return f"{legend}#{titles}\n#{marks}\n"


class GraphPrinter:
    """Printer of records as a call graph, with the state of each CPU's calls.

    Each rendering of a trace file has a new printer; trace_pipe keeps one between reads.
    """

    def __init__(self, cpus: int, options: TracerOptions) -> None:
        self.is_on = options.is_on
        self.has_args = options.has_args
        self.cpu_width = len(str(cpus - 1))
        self.cpus = [_CpuState() for _ in range(cpus)]

    def prints(self, record: bytes) -> bool:
        """Return True if a call graph shows the record as a call, a return or a comment.

        Return False if the graph shows it as a line of its own, outside of the tree: records of the function
        tracer and stack traces.
        """
        return TRACE_ENTRY.unpack_from(record)[0] not in (EntryType.STACK, EntryType.FN)

    def line(self, entry: TimedRecord, following: bytes | None, formatter: LineFormatter) -> str:
        """Return the lines of a record.

        Return "" for the return of a leaf function, because the line of its call shows it. `following`: data
        of the CPU's next record, or None if there is none. A trace file also passes None if a record of
        another CPU comes before that one. `formatter` holds the trace options, and prints comments.
        """
        line = _GraphLine(entry, self, formatter)
        kind = TRACE_ENTRY.unpack_from(entry.record)[0]
        if kind == EntryType.GRAPH_RET:
            return line.returned()
        if kind == EntryType.GRAPH_ENT:
            return line.entered(following)
        return line.comment()


class _GraphLine:
    """Printer of one record in a call graph."""

    def __init__(self, entry: TimedRecord, printer: GraphPrinter, formatter: LineFormatter) -> None:
        _, self._context_flags, self._preempt_count, self._pid = TRACE_ENTRY.unpack_from(entry.record)
        self._entry = entry
        self._state = printer.cpus[entry.cpu]
        self._is_on = printer.is_on
        self._cpu = f" {entry.cpu:>{printer.cpu_width}}) "
        self._formatter = formatter
        self._has_context = TraceOption.CONTEXT_INFO in formatter.flags
        self._records = GraphRecords(formatter.style.word_size, has_args=printer.has_args)

    def entered(self, following: bytes | None) -> str:
        """Return the lines of a call. `following`: see GraphPrinter.line().

        Mirrors: kernel/trace/trace_functions_graph.c:print_graph_entry_leaf, print_graph_entry_nested (v6.1).
        """
        fields: tuple[int, int] = self._records.entered.unpack_from(self._entry.record, TRACE_ENTRY.size)
        func, depth = fields
        state = self._state
        prologue = self._prologue()
        leaf = self._leaf_duration(func, following)
        if leaf is None:
            state.depth = depth
            if depth < MAX_DEPTH:
                state.functions[depth] = func
            return prologue + self._column(None) + " " * (depth * INDENT) + f"{self._call(func)} {{\n"
        state.depth = depth - 1
        state.was_leaf = True
        state.functions.pop(depth, None)
        return prologue + self._column(leaf) + " " * (depth * INDENT) + f"{self._call(func)};\n"

    def _leaf_duration(self, func: int, following: bytes | None) -> int | None:
        """Return the duration of a call of `func` in ns, if `following` is the call's return; else None."""
        if following is None:
            return None
        kind, _, _, their_pid = TRACE_ENTRY.unpack_from(following)
        if kind != EntryType.GRAPH_RET or their_pid != self._pid:
            return None
        returned, _, _, called, left = self._records.returned.unpack_from(following, TRACE_ENTRY.size)
        return left - called if returned == func else None

    def returned(self) -> str:
        """Return the lines of a return, or "" if the line of the call shows the return.

        Mirrors: kernel/trace/trace_functions_graph.c:print_graph_return (v6.1).
        """
        state = self._state
        if state.was_leaf:
            state.was_leaf = False
            return ""
        record = self._entry.record
        fields: tuple[int, int, int, int, int] = self._records.returned.unpack_from(record, TRACE_ENTRY.size)
        func, depth, overrun, called, left = fields
        prologue = self._prologue()
        state.depth = depth - 1
        matches = depth >= MAX_DEPTH or state.functions.pop(depth, 0) == func
        named = not matches or self._is_on(GraphOption.TAIL)
        closing = f"}} /* {self._name(func)} */\n" if named else "}\n"
        if self._is_on(GraphOption.OVERRUN):
            closing += f" (Overruns: {overrun})\n"
        return prologue + self._column(left - called) + " " * (depth * INDENT) + closing

    def comment(self) -> str:
        """Return the record of an event or of another tracer as lines of a comment.

        Mirrors: kernel/trace/trace_functions_graph.c:print_graph_comment (v6.1).
        """
        depth = self._state.depth
        indent = " " * ((depth + 1) * INDENT) if depth > 0 else ""
        text = self._formatter.comment(self._entry).rstrip("\n")
        return f"{self._prologue()}{self._column(None)}{indent}/* {text} */\n"

    def _call(self, func: int) -> str:
        """Return the function's name and its arguments, if the record has them."""
        arguments = self._formatter.style.arguments
        end = self._entry.record[TRACE_ENTRY.size + self._records.entered.size :]
        return f"{self._name(func)}{(arguments and arguments(func, end)) or '()'}"

    def _name(self, func: int) -> str:
        return print_ip(self._formatter.style.symbols, func, offset=False, digits=0)

    def _prologue(self) -> str:
        """Return the columns before the duration.

        Mirrors: kernel/trace/trace_functions_graph.c:print_graph_prologue (v6.1).
        """
        text = self._switch()
        if not self._has_context:
            return text
        if self._is_on(GraphOption.ABSTIME):
            seconds, rest = divmod(self._entry.time_stamp, 1_000_000_000)
            text += f"{seconds:5d}.{rest // 1000:06d} |  "
        if self._is_on(GraphOption.CPU):
            text += self._cpu
        if self._is_on(GraphOption.PROC):
            text += f"{self._task(self._pid)} | "
        if TraceOption.LATENCY_FMT in self._formatter.flags:
            columns = self._formatter.columns
            text += f" {latency_flags(self._context_flags, self._preempt_count, columns)} | "
        return text

    def _switch(self) -> str:
        """Return the lines that say that another task runs on the CPU; "" if the task did not change.

        Mirrors: kernel/trace/trace_functions_graph.c:verif_pid (v6.1).
        """
        previous = self._state.last_pid
        self._state.last_pid = self._pid
        if previous in (-1, self._pid):
            return ""
        return f"{_RULE}{self._cpu}{self._task(previous)} => {self._task(self._pid)}\n{_RULE}\n"

    def _task(self, pid: int) -> str:
        text = f"{self._formatter.cmdlines.find(pid)[:_COMM_SHOWN]}-{pid}"
        spaces = max(0, _PROCINFO_LENGTH - len(text))
        return " " * (spaces // 2) + text + " " * (spaces - spaces // 2)

    def _column(self, nanoseconds: int | None) -> str:
        """Return the column with the overhead mark and the duration; blank if `nanoseconds` is None.

        Mirrors: kernel/trace/trace_functions_graph.c:print_graph_duration (v6.1).
        """
        if not self._has_context or not self._is_on(GraphOption.DURATION):
            return ""
        if nanoseconds is None:
            return _NO_TIME
        mark = find_mark(nanoseconds) if self._is_on(GraphOption.OVERHEAD) else " "
        return f"{mark} {duration_text(nanoseconds)}|  "
