"""The function_graph tracer: which calls are recorded, and their records."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from emulated_kernel.errors import KernelError
from emulated_kernel.trace.chars import bytes_to_text
from emulated_kernel.trace.function_graph import GraphRecords
from emulated_kernel.trace.functions import Functions
from emulated_kernel.trace.trace_entry import EntryType
from emulated_kernel.trace.tracer_options import GraphOption, TracerOptions
from emulated_kernel.trace.user_words import take_word


class GraphSet:
    """A file of functions: names and globs add, with `!` take away; the empty set shows a note.

    Deviates: what is written holds at once; Linux waits for the file's last close.
    Mirrors: kernel/trace/ftrace.c:ftrace_graph_write, ftrace_graph_set_hash, g_show (v6.1).
    """

    def __init__(self, functions: Functions, note: str) -> None:
        self._functions = functions
        self._note = note
        self.addresses: frozenset[int] = frozenset()

    def records(self) -> Iterable[str]:
        if not self.addresses:
            return [f"#### {self._note} ####\n"]
        return [f"{each.shown}\n" for each in self._functions if each.site in self.addresses]

    def write(self, data: bytes) -> int:
        """One write(2): its first word; bytes taken. Raises: KernelError EINVAL where it means nothing."""
        word, size = take_word(data)
        if word:
            self._choose(word)
        return size

    def _choose(self, word: bytes) -> None:
        pattern = word.removeprefix(b"!")
        # Linux: numbers, which other filters take for places in the list, match nothing.
        found = frozenset() if pattern[:1].isdigit() else self._functions.matching(pattern)
        if pattern != word:
            found &= self.addresses
        if not found:
            raise KernelError(errno.EINVAL, f"no function is meant by {bytes_to_text(word)}")
        self.addresses = self.addresses | found if pattern == word else self.addresses - found

    def clear(self) -> None:
        self.addresses = frozenset()

    def forget(self, sites: frozenset[int]) -> None:
        """Functions of a module that goes."""
        self.addresses -= sites


@dataclass(frozen=True, slots=True)
class Frame:
    """A call that hasn't returned; what its task's shadow stack keeps of it."""

    func: int
    depth: int
    is_hidden: bool = False
    """In set_graph_notrace: neither it nor what it calls is recorded."""
    in_irq: bool = False
    """Called in a hard interrupt."""
    called_ns: int = 0
    slept_ns: int = 0
    """What its task had slept by then; see GraphMoment.slept_ns."""


class GraphMoment(Protocol):
    """What there is to know when a function is called or returns."""

    def in_hardirq(self, regs: Any, /) -> bool: ...

    def ignores_task(self) -> bool:
        """Whether the current task's calls aren't to be recorded: set_ftrace_pid."""

    def slept_ns(self) -> int:
        """How long the current task was off the CPU, as far as that isn't to count."""

    def overran(self) -> None:
        """The current task makes a call too deep to be followed."""

    def overruns(self) -> int:
        """How many such calls it has made."""


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
        functions: Functions,
        hooks: GraphHooks,
        record: Record,
        moment: GraphMoment,
        options: TracerOptions,
        now_ns: Callable[[], int],
        word_size: int,
    ) -> None:
        self.functions = GraphSet(functions, "all functions enabled")
        self.notrace = GraphSet(functions, "no functions disabled")
        functions.watch(self)
        self.max_depth = 0
        """Calls nested deeper aren't recorded; 0: all are."""
        self.threshold_ns = 0
        """tracing_thresh: only calls that took at least so long are recorded, by their returns alone."""
        self._hooks = hooks
        self._record = record
        self._moment = moment
        self._options = options
        self.overran = moment.overran
        self._now_ns = now_ns
        self._records = GraphRecords.of(word_size)

    def set_max_depth(self, depth: int) -> None:
        """max_graph_depth, an unsigned int."""
        self.max_depth = depth & 0xFFFFFFFF

    def module_came(self, module: str) -> None:
        """The filters, which hold here too, see to it."""

    def functions_went(self, sites: frozenset[int]) -> None:
        """They can't be traced any more."""
        self.functions.forget(sites)
        self.notrace.forget(sites)

    def start(self) -> None:
        """Raises: KernelError as GraphHooks.start."""
        self._hooks.start(self)

    def stop(self) -> None:
        self._hooks.stop()

    def entered(self, func: int, parent: Frame | None, regs: Any) -> Frame | None:
        """A function begins, called by the one in `parent`; None where its return doesn't matter.

        Mirrors: trace_graph_entry (v6.1).
        """
        depth = 0 if parent is None else parent.depth + 1
        if parent is not None and parent.is_hidden:
            return None
        if func in self.notrace.addresses:
            return Frame(func, depth, is_hidden=True)
        in_irq = self._moment.in_hardirq(regs)
        if self._moment.ignores_task() or self._ignores(func, parent, depth, in_irq=in_irq):
            return None
        now = self._now_ns()
        if not self.threshold_ns:
            self._record(EntryType.GRAPH_ENT, self._records.entered.pack(func, depth), regs, now)
        return Frame(func, depth, in_irq=in_irq, called_ns=now, slept_ns=self._moment.slept_ns())

    def _ignores(self, func: int, parent: Frame | None, depth: int, *, in_irq: bool) -> bool:
        """Mirrors: ftrace_graph_ignore_func, ftrace_graph_ignore_irqs (v6.1)."""
        chosen = self.functions.addresses
        if (chosen and parent is None and func not in chosen) or 0 < self.max_depth <= depth:
            return True
        if not in_irq or self._options.is_on(GraphOption.IRQS):
            return False
        # What was asked for by name is recorded in interrupts too, with all that it calls.
        return func not in chosen and not (parent is not None and parent.in_irq)

    def returned(self, frame: Frame, regs: Any) -> None:
        """Mirrors: trace_graph_return, trace_graph_thresh_return (v6.1)."""
        if frame.is_hidden:
            return
        now = self._now_ns()
        called = frame.called_ns + self._moment.slept_ns() - frame.slept_ns
        if now - called < self.threshold_ns:
            return
        overruns = self._moment.overruns()
        payload = self._records.returned.pack(frame.func, frame.depth, overruns, called, now)
        self._record(EntryType.GRAPH_RET, payload, regs, now)
