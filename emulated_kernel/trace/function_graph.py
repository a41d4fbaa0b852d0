"""The function_graph tracer's records, and its text: calls as a tree, with what each took.

Mirrors: kernel/trace/trace_functions_graph.c (v6.1)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from struct import Struct

from emulated_kernel.trace.cmdlines import SavedCmdlines
from emulated_kernel.trace.options import TraceOption
from emulated_kernel.trace.symbols import print_ip
from emulated_kernel.trace.trace_entry import TRACE_ENTRY, AddressStyle, EntryType

NAME = "function_graph"
HEADER = "# CPU  DURATION                  FUNCTION CALLS\n# |     |   |                     |   |   |   |\n"
INDENT = 2
MAX_DEPTH = 50
"""FTRACE_RETFUNC_DEPTH: calls nested deeper aren't matched with their returns."""
_PROCINFO_LENGTH = 14
_NO_TIME = "              |  "
_RULE = " ------------------------------------------\n"
_MARKS = (
    (1_000_000_000, "$"),
    (100_000_000, "@"),
    (10_000_000, "*"),
    (1_000_000, "#"),
    (100_000, "!"),
    (10_000, "+"),
)
_COMM_SHOWN = 7


@dataclass(frozen=True)
class GraphRecords:
    """struct ftrace_graph_ent_entry and ftrace_graph_ret_entry, behind their trace_entry."""

    entered: Struct
    """func, depth"""
    returned: Struct
    """func, depth, overrun, calltime, rettime; nanoseconds"""

    @classmethod
    def of(cls, word_size: int) -> GraphRecords:
        word = "Q" if word_size == 8 else "I"
        return cls(Struct(f"<{word}i"), Struct(f"<{word}iIQQ"))


def duration_text(nanoseconds: int) -> str:
    """Microseconds in seven digits at most. Mirrors: trace_print_graph_duration (v6.1)."""
    usecs, rest = divmod(nanoseconds, 1000)
    text = str(usecs)
    if len(text) < 7:
        text += "." + f"{rest:03d}"[: 7 - len(text)]
    return f"{text} us " + " " * (8 - len(text))


def overhead_mark(nanoseconds: int) -> str:
    """Mirrors: kernel/trace/trace_output.c:trace_find_mark (v6.1)."""
    return next((mark for limit, mark in _MARKS if nanoseconds > limit), " ")


@dataclass
class _CpuState:
    """How far the text of a CPU is. Mirrors: struct fgraph_cpu_data (v6.1)."""

    last_pid: int = -1
    depth: int = 0
    functions: dict[int, int] = field(default_factory=dict)
    """Those that were entered and not yet left, by depth."""
    was_leaf: bool = False
    """The next return has been printed with its call."""


class GraphPrinter:
    """Prints the records of one rendering in their order. Options are the tracer's default ones."""

    def __init__(self, flags: TraceOption, cmdlines: SavedCmdlines, style: AddressStyle, cpus: int) -> None:
        self._context = TraceOption.CONTEXT_INFO in flags
        self._cmdlines = cmdlines
        self._style = style
        self._records = GraphRecords.of(style.word_size)
        self._width = len(str(cpus - 1))
        self._cpus = [_CpuState() for _ in range(cpus)]

    def line(self, cpu: int, record: bytes, following: bytes | None, text: str) -> str:
        """A record's lines; "" for a return that its call's line has told of already.

        `following` is the next record of that CPU, `text` what is said of a record of another kind.
        """
        kind, _, _, pid = TRACE_ENTRY.unpack_from(record)
        state, payload = self._cpus[cpu], record[TRACE_ENTRY.size :]
        if kind == EntryType.GRAPH_RET:
            if state.was_leaf:
                state.was_leaf = False
                return ""
            return self._returned(cpu, pid, state, payload)
        if kind == EntryType.GRAPH_ENT:
            return self._entered(cpu, pid, state, payload, following)
        return self._comment(cpu, pid, state, text)

    def _entered(self, cpu: int, pid: int, state: _CpuState, payload: bytes, following: bytes | None) -> str:
        func, depth = map(int, self._records.entered.unpack_from(payload))
        prologue = self._prologue(cpu, pid, state)
        leaf = self._leaf_duration(func, pid, following)
        if leaf is None:
            state.depth = depth
            if depth < MAX_DEPTH:
                state.functions[depth] = func
            return prologue + self._column(None) + " " * (depth * INDENT) + f"{self._name(func)}() {{\n"
        state.depth, state.was_leaf = depth - 1, True
        state.functions.pop(depth, None)
        return prologue + self._column(leaf) + " " * (depth * INDENT) + f"{self._name(func)}();\n"

    def _leaf_duration(self, func: int, pid: int, following: bytes | None) -> int | None:
        """Nanoseconds of a call whose return comes next, with nothing in between."""
        if following is None:
            return None
        kind, _, _, their_pid = TRACE_ENTRY.unpack_from(following)
        if kind != EntryType.GRAPH_RET or their_pid != pid:
            return None
        returned, _, _, called, left = self._records.returned.unpack_from(following, TRACE_ENTRY.size)
        return left - called if returned == func else None

    def _returned(self, cpu: int, pid: int, state: _CpuState, payload: bytes) -> str:
        func, depth, _, called, left = map(int, self._records.returned.unpack_from(payload))
        prologue = self._prologue(cpu, pid, state)
        state.depth = depth - 1
        matches = depth >= MAX_DEPTH or state.functions.pop(depth, 0) == func
        closing = "}\n" if matches else f"}} /* {self._name(func)} */\n"
        return prologue + self._column(left - called) + " " * (depth * INDENT) + closing

    def _comment(self, cpu: int, pid: int, state: _CpuState, text: str) -> str:
        """Another tracer's or an event's record in between. Mirrors: print_graph_comment (v6.1)."""
        indent = " " * ((state.depth + 1) * INDENT) if state.depth > 0 else ""
        return (
            self._prologue(cpu, pid, state) + self._column(None) + f"{indent}/* {text.rstrip(chr(10))} */\n"
        )

    def _name(self, func: int) -> str:
        return print_ip(self._style.symbols, func, offset=False, digits=0)

    def _prologue(self, cpu: int, pid: int, state: _CpuState) -> str:
        switch = self._switch(cpu, pid, state)
        return switch + (f" {cpu:>{self._width}}) " if self._context else "")

    def _switch(self, cpu: int, pid: int, state: _CpuState) -> str:
        """Another task runs on this CPU now. Mirrors: verif_pid (v6.1)."""
        previous, state.last_pid = state.last_pid, pid
        if previous in (-1, pid):
            return ""
        who = f" {cpu:>{self._width}}) {self._task(previous)} => {self._task(pid)}"
        return f"{_RULE}{who}\n{_RULE}\n"

    def _task(self, pid: int) -> str:
        text = f"{self._cmdlines.find(pid)[:_COMM_SHOWN]}-{pid}"
        spaces = max(0, _PROCINFO_LENGTH - len(text))
        return " " * (spaces // 2) + text + " " * (spaces - spaces // 2)

    def _column(self, nanoseconds: int | None) -> str:
        """The overhead mark and the duration. Mirrors: print_graph_duration (v6.1)."""
        if not self._context:
            return ""
        if nanoseconds is None:
            return _NO_TIME
        return f"{overhead_mark(nanoseconds)} {duration_text(nanoseconds)}|  "
