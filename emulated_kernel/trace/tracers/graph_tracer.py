"""The function_graph tracer, which records entries and returns of selected functions."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from emulated_kernel.kprobes.return_hook.return_hook import RethookNode
from emulated_kernel.trace.array.services import Tracer
from emulated_kernel.trace.array.trace_array import TraceArray
from emulated_kernel.trace.compiled.calls import SelectedTasks
from emulated_kernel.trace.compiled.graph import FRAME, CallFlag, CompiledGraph
from emulated_kernel.trace.context.trace_ctx import HitContext
from emulated_kernel.trace.events.event_pids import EventPids
from emulated_kernel.trace.output.function_args import COUNT
from emulated_kernel.trace.output.graph_output import GraphRecords
from emulated_kernel.trace.output.tracer_options import GraphOption
from emulated_kernel.trace.ring.trace_entry import EntryFlag, EntryType
from emulated_kernel.trace.tracers.available_functions import Functions, FunctionWatcher
from emulated_kernel.trace.tracers.fgraph import FunctionGraph, GraphUser
from emulated_kernel.trace.tracers.function_filter import GraphSet
from emulated_kernel.util.fast_named_tuple import NamedTuple


class PendingCall(NamedTuple):
    """A call that has not returned, as stored on its task's shadow stack in the format FRAME."""

    func: int
    called_ns: int
    """Start time of the call in nanoseconds.

    If option sleep-time is off, the time that the task has been off the CPU since then is added.
    """
    depth: int
    """Nesting depth of the call: its number of hooked callers."""
    flags: int
    """Bits of CallFlag."""


class GraphTracer(Tracer, FunctionWatcher, GraphUser):
    """The function_graph tracer of the top array. Mirrors: kernel/trace/trace_functions_graph.c (v6.1).

    If compiled() allows it, guest code (trace/compiled/graph.py) handles all calls after the first one.
    """

    symbols = ("trace_graph_entry", "trace_graph_return")
    data_size = FRAME.size

    def __init__(
        self,
        graph: FunctionGraph,
        functions: Functions,
        array: TraceArray,
        pids: EventPids,
        context: HitContext,
    ) -> None:
        """Create a tracer that is stopped, with empty filters: it will trace all functions.

        `pids`: the function tracer's lists of pids.
        """
        self.functions = GraphSet(functions, "all functions enabled", graph.user_changed)
        self.notrace = GraphSet(functions, "no functions disabled", graph.user_changed)
        functions.watch(self)
        self.max_depth = 0
        """Value of max_graph_depth: number of levels of nested calls that are recorded; 0: no limit."""
        self.threshold_ns = 0
        """Value of tracing_thresh in nanoseconds.

        If the value is not 0, only returns are recorded, and only of calls that took at least this time.
        """
        self._graph = graph
        self._pids = pids
        self._context = context
        self._array = array
        self._tasks = array.system.tasks
        self._now_ns = array.system.now_ns
        self._options = array.system.tracer_options
        self._records = GraphRecords(array.system.arch.word_size, has_args=self._options.has_args)
        self._arguments = attrgetter(*array.system.arch.registers.arguments[:COUNT])

    def set_max_depth(self, depth: int) -> None:
        """Set max_graph_depth to `depth`, truncated to an unsigned int."""
        self.max_depth = depth & 0xFFFFFFFF
        self._graph.user_changed()

    def set_threshold(self, nanoseconds: int) -> None:
        """Set tracing_thresh to `nanoseconds`."""
        self.threshold_ns = nanoseconds
        self._graph.user_changed()

    def start(self) -> None:
        """Begin to record calls. Raises: errors of FunctionGraph.register()."""
        self._graph.register(self)

    def stop(self) -> None:
        self._graph.unregister()

    def option_changed(self, name: str) -> None:
        if name in (GraphOption.IRQS, GraphOption.ARGS):
            self._graph.user_changed()

    def rewired(self) -> None:
        """Drop the guest code, because it was compiled for buffers or lists of pids that have changed."""
        self._graph.user_changed()

    def compiled(self) -> CompiledGraph | None:
        """Return the settings of guest code that records calls, or None if Python must handle the calls.

        Python handles the calls if the clock or an option keeps guest code from writing to the buffers.
        Python also handles the calls if the lists of pids are very long, or if the arguments are recorded.
        Guest code implements all other settings. If a function has a further ftrace_ops, FtraceSites passes
        the calls of this function to Python.
        """
        target = self._array.ring_target()
        pids = self._pids
        if self._options.is_on(GraphOption.ARGS):
            return None
        tasks = SelectedTasks.of(pids.traced.pids, pids.untraced.pids)
        if target is None or tasks is None:
            return None
        return CompiledGraph(
            target=target,
            entry_count=self._context.disabled_once,
            depth_size=self._records.depth_size,
            chosen=self.functions.sites,
            hidden=self.notrace.sites,
            max_depth=self.max_depth,
            threshold_ns=self.threshold_ns,
            takes_irqs=self._options.is_on(GraphOption.IRQS),
            tasks=tasks,
        )

    def functions_removed(self, sites: frozenset[int]) -> None:
        """Remove from the filters the functions with the fentry sites `sites`, which no longer exist."""
        self.functions.functions_removed(sites)
        self.notrace.functions_removed(sites)

    # Recording

    def entered(self, func: int, caller: RethookNode | None, regs: Any) -> bytes | None:
        """Record a call if the tracer's settings select it, and return its PendingCall as bytes.

        Return None if the call's return need not be handled. `caller`, `regs`: see GraphUser.entered().
        Mirrors: kernel/trace/trace_functions_graph.c:trace_graph_entry (v6.1).
        """
        frame = self._frame(func, None if caller is None else _read(caller), regs)
        return None if frame is None else FRAME.pack(*frame)

    def _frame(self, func: int, parent: PendingCall | None, regs: Any) -> PendingCall | None:
        """Record a call of `func` by `parent` if the tracer's settings select the call.

        Return the data to keep until the call returns, or None if the return need not be handled. `parent`:
        the innermost traced call of the task; None if it has none. `regs`: the registers at the entry.
        """
        depth = 0 if parent is None else parent.depth + 1
        if parent is not None and parent.flags & CallFlag.HIDDEN:
            return None
        if func in self.notrace.sites:
            return PendingCall(func, 0, depth, CallFlag.HIDDEN)
        in_irq = bool(self._context.hit_trace_ctx(regs)[0] & EntryFlag.HARDIRQ)
        pids = self._pids
        pid = self._tasks.pid()
        if (pids.is_active and pids.ignores(pid)) or self._ignores(func, parent, depth, in_irq=in_irq):
            return None
        now = self._now_ns()
        if not self.threshold_ns:
            # Linux: ftrace's guard against recursion has disabled preemption.
            disabled = self._context.disabled_once
            record = self._records.entered.pack(func, depth)
            if self._options.is_on(GraphOption.ARGS):
                record += self._records.arguments.pack(*self._arguments(regs))
            self._record(EntryType.GRAPH_ENT, record, regs, now, disabled)
        return PendingCall(func, now, depth, CallFlag.IN_IRQ if in_irq else 0)

    def _ignores(self, func: int, parent: PendingCall | None, depth: int, *, in_irq: bool) -> bool:
        """Return True if set_graph_function, max_graph_depth or option funcgraph-irqs exclude a call.

        `parent`: the innermost traced call of the task; None if it has none. `depth`: nesting depth of the
        call. `in_irq`: whether the call is made in a hard interrupt.
        Mirrors: kernel/trace/trace.h:ftrace_graph_ignore_func,
        kernel/trace/trace_functions_graph.c:ftrace_graph_ignore_irqs (v6.1).
        """
        chosen = self.functions.sites
        if (chosen and parent is None and func not in chosen) or 0 < self.max_depth <= depth:
            return True
        if not in_irq or self._options.is_on(GraphOption.IRQS):
            return False
        # Functions in set_graph_function are recorded in interrupts too, with all their callees.
        return func not in chosen and not (parent is not None and parent.flags & CallFlag.IN_IRQ)

    def returned(self, instance: RethookNode, regs: Any) -> None:
        """Record a call's return, unless set_graph_notrace hides the call or tracing_thresh was not reached.

        `instance`, `regs`: see GraphUser.returned().
        Mirrors: kernel/trace/trace_functions_graph.c:trace_graph_return, trace_graph_thresh_return (v6.1).
        """
        frame = _read(instance)
        if frame.flags & CallFlag.HIDDEN:
            return
        now = self._now_ns()
        if now - frame.called_ns < self.threshold_ns:
            return
        overruns = self._graph.overruns()
        payload = self._records.returned.pack(frame.func, frame.depth, overruns, frame.called_ns, now)
        self._record(EntryType.GRAPH_RET, payload, regs, now)

    def _record(self, kind: EntryType, payload: bytes, regs: Any, stamp: int, disabled: int = 0) -> None:
        flags, preempt_count = self._context.hit_trace_ctx(regs, disabled)
        task = self._tasks.context()
        self._array.append(
            kind,
            payload,
            cpu=task.cpu,
            pid=task.pid,
            comm=task.comm,
            flags=flags,
            preempt_count=preempt_count,
            timestamp_ns=stamp,
        )


def _read(instance: RethookNode) -> PendingCall:
    return PendingCall(*FRAME.unpack(instance.data))
