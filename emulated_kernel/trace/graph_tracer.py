"""The function_graph tracer: which calls are recorded, and their records."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

from emulated_kernel.errors import KernelError
from emulated_kernel.trace.function_graph import GraphRecords
from emulated_kernel.trace.trace_entry import EntryType


class FunctionSet:
    """A file of functions: names and globs add, with `!` take away; the empty set shows a note.

    Deviates: what is written holds at once; Linux waits for the file's last close.
    Mirrors: kernel/trace/ftrace.c:ftrace_graph_write, g_show (v6.1).
    """

    def __init__(self, functions: Mapping[str, int], note: str) -> None:
        """`functions` gives the address of each that can be traced."""
        self._functions = functions
        self._note = note
        self.addresses: frozenset[int] = frozenset()

    def records(self) -> Iterable[str]:
        if not self.addresses:
            return [f"#### {self._note} ####\n"]
        return [f"{name}\n" for name, address in self._functions.items() if address in self.addresses]

    def write(self, data: bytes) -> int:
        """Raises: KernelError EINVAL where a word means no function."""
        for word in data.decode("utf-8", "surrogateescape").split():
            pattern = word.removeprefix("!")
            found = {at for name, at in self._functions.items() if fnmatchcase(name, pattern)}
            if not found:
                raise KernelError(errno.EINVAL, f"no function {pattern} can be traced")
            self.addresses = self.addresses - found if word != pattern else self.addresses | found
        return len(data)

    def clear(self) -> None:
        self.addresses = frozenset()


@dataclass(frozen=True, slots=True)
class Frame:
    """A call that hasn't returned; what its task's shadow stack keeps of it."""

    func: int
    depth: int
    is_hidden: bool
    """In set_graph_notrace: neither it nor what it calls is recorded."""
    called_ns: int


class GraphHooks(Protocol):
    """Hooks function entries and returns. One hook may be on at a time."""

    def start(self, graph: GraphTracer, /) -> None:
        """Raises: KernelError EBUSY, ENOMEM, EOPNOTSUPP."""

    def stop(self) -> None: ...


Record = Callable[[EntryType, bytes, Any, int], None]
"""(kind, payload, registers, time in ns) goes to the buffer."""


class GraphTracer:
    """Implements trace_array.Tracer. Mirrors: kernel/trace/trace_functions_graph.c (v6.1)."""

    def __init__(
        self,
        functions: Mapping[str, int],
        hooks: GraphHooks,
        record: Record,
        now_ns: Callable[[], int],
        word_size: int,
    ) -> None:
        self.functions = FunctionSet(functions, "all functions enabled")
        self.notrace = FunctionSet(functions, "no functions disabled")
        self.max_depth = 0
        """Calls nested deeper aren't recorded; 0: all are."""
        self._hooks = hooks
        self._record = record
        self._now_ns = now_ns
        self._records = GraphRecords.of(word_size)

    def set_max_depth(self, depth: int) -> None:
        """max_graph_depth, an unsigned int."""
        self.max_depth = depth & 0xFFFFFFFF

    def start(self) -> None:
        """Raises: KernelError as GraphHooks.start."""
        self._hooks.start(self)

    def stop(self) -> None:
        self._hooks.stop()

    def entered(self, func: int, parent: Frame | None, regs: Any) -> Frame | None:
        """A function begins, called by the one in `parent`; None where its return doesn't matter.

        Mirrors: trace_graph_entry, ftrace_graph_ignore_func (v6.1).
        """
        depth = 0 if parent is None else parent.depth + 1
        if parent is not None and parent.is_hidden:
            return None
        if func in self.notrace.addresses:
            return Frame(func, depth, True, 0)
        wanted = self.functions.addresses
        if (wanted and parent is None and func not in wanted) or 0 < self.max_depth <= depth:
            return None
        now = self._now_ns()
        self._record(EntryType.GRAPH_ENT, self._records.entered.pack(func, depth), regs, now)
        return Frame(func, depth, False, now)

    def returned(self, frame: Frame, regs: Any) -> None:
        """Mirrors: trace_graph_return (v6.1)."""
        if frame.is_hidden:
            return
        now = self._now_ns()
        payload = self._records.returned.pack(frame.func, frame.depth, 0, frame.called_ns, now)
        self._record(EntryType.GRAPH_RET, payload, regs, now)
