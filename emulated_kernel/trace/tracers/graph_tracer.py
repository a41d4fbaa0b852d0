"""The function_graph tracer: records calls as a tree, those that are chosen."""

from __future__ import annotations

from typing import Any, NamedTuple

from emulated_kernel.kprobes.return_hook.return_hook import RethookNode
from emulated_kernel.trace.array.services import Tracer
from emulated_kernel.trace.array.trace_array import TraceArray
from emulated_kernel.trace.compiled.graph import FRAME, CallFlag, CompiledGraph
from emulated_kernel.trace.context.trace_ctx import HitContext
from emulated_kernel.trace.events.event_pids import EventPids
from emulated_kernel.trace.output.graph_output import GraphRecords
from emulated_kernel.trace.output.tracer_options import GraphOption
from emulated_kernel.trace.ring.trace_entry import EntryFlag, EntryType
from emulated_kernel.trace.tracers.available_functions import Functions, FunctionWatcher
from emulated_kernel.trace.tracers.fgraph import FunctionGraph, GraphUser
from emulated_kernel.trace.tracers.function_filter import GraphSet


class PendingCall(NamedTuple):
    """A call that hasn't returned; what its task's shadow stack keeps of it, as FRAME says."""

    func: int
    called_ns: int
    """Later by what its task has slept since, where option sleep-time is off."""
    depth: int
    flags: int


class GraphTracer(Tracer, FunctionWatcher, GraphUser):
    """That of the top trace array. Mirrors: kernel/trace/trace_functions_graph.c (v6.1).

    From the second call on guest code does the same, where compiled() says so (trace/compiled/graph.py).
    """

    data_size = FRAME.size

    def __init__(
        self,
        graph: FunctionGraph,
        functions: Functions,
        array: TraceArray,
        pids: EventPids,
        context: HitContext,
    ) -> None:
        """`pids`: set_ftrace_pid of the function tracer."""
        self.functions = GraphSet(functions, "all functions enabled", graph.user_changed)
        self.notrace = GraphSet(functions, "no functions disabled", graph.user_changed)
        functions.watch(self)
        self.max_depth = 0
        """Calls nested deeper aren't recorded; 0: all are."""
        self.threshold_ns = 0
        """tracing_thresh: only calls that took at least so long are recorded, by their returns alone."""
        self._graph = graph
        self._pids = pids
        self._context = context
        self._array = array
        self._tasks = array.system.tasks
        self._now_ns = array.system.now_ns
        self._options = array.system.tracer_options
        self._records = GraphRecords(array.system.arch.word_size)

    def set_max_depth(self, depth: int) -> None:
        """max_graph_depth, an unsigned int."""
        self.max_depth = depth & 0xFFFFFFFF
        self._graph.user_changed()

    def set_threshold(self, nanoseconds: int) -> None:
        """tracing_thresh."""
        self.threshold_ns = nanoseconds
        self._graph.user_changed()

    def start(self) -> None:
        """Raises: KernelError (as FunctionGraph.register())."""
        self._graph.register(self)

    def stop(self) -> None:
        self._graph.unregister()

    def option_changed(self, name: str) -> None:
        if name == GraphOption.IRQS:
            self._graph.user_changed()

    def rewired(self) -> None:
        """See Tracer."""
        self._graph.user_changed()

    def compiled(self) -> CompiledGraph | None:
        """See GraphUser: this is the one place that decides.

        Python handles the calls while the array's buffers can't be written to by guest code, for their
        clock or an option, and under lists of very many tasks; those of functions that others want calls
        from, too, come to it (FtraceSites). Whatever else there is to choose becomes code.
        """
        target = self._array.ring_target()
        pids = self._pids
        if target is None:
            return None
        compiled = CompiledGraph(
            target=target,
            entry_count=self._context.disabled_once,
            chosen=self.functions.sites,
            hidden=self.notrace.sites,
            max_depth=self.max_depth,
            threshold_ns=self.threshold_ns,
            takes_irqs=self._options.is_on(GraphOption.IRQS),
            traced=pids.traced.pids,
            untraced=pids.untraced.pids,
        )
        return compiled if compiled.fits else None

    def functions_went(self, sites: frozenset[int]) -> None:
        """They can't be traced any more."""
        self.functions.functions_went(sites)
        self.notrace.functions_went(sites)

    # Recording

    def entered(self, func: int, caller: RethookNode | None, regs: Any) -> bytes | None:
        """See GraphUser. Mirrors: trace_graph_entry (v6.1)."""
        frame = self._frame(func, None if caller is None else _read(caller), regs)
        return None if frame is None else FRAME.pack(*frame)

    def _frame(self, func: int, parent: PendingCall | None, regs: Any) -> PendingCall | None:
        """What is kept of a call by the function in `parent`; None where its return doesn't matter."""
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
            # Linux: what guards the hook against recursion disables preemption.
            disabled = self._context.disabled_once
            self._record(EntryType.GRAPH_ENT, self._records.entered.pack(func, depth), regs, now, disabled)
        return PendingCall(func, now, depth, CallFlag.IN_IRQ if in_irq else 0)

    def _ignores(self, func: int, parent: PendingCall | None, depth: int, *, in_irq: bool) -> bool:
        """Mirrors: ftrace_graph_ignore_func, ftrace_graph_ignore_irqs (v6.1)."""
        chosen = self.functions.sites
        if (chosen and parent is None and func not in chosen) or 0 < self.max_depth <= depth:
            return True
        if not in_irq or self._options.is_on(GraphOption.IRQS):
            return False
        # What was asked for by name is recorded in interrupts too, with all that it calls.
        return func not in chosen and not (parent is not None and parent.flags & CallFlag.IN_IRQ)

    def returned(self, instance: RethookNode, regs: Any) -> None:
        """See GraphUser. Mirrors: trace_graph_return, trace_graph_thresh_return (v6.1)."""
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
        flags, preempt_count = self._context.hit_trace_ctx(regs)
        task = self._tasks.context()
        self._array.append(
            kind,
            payload,
            cpu=task.cpu,
            pid=task.pid,
            comm=task.comm,
            flags=flags,
            preempt_count=preempt_count + disabled,
            timestamp_ns=stamp,
        )


def _read(instance: RethookNode) -> PendingCall:
    return PendingCall(*FRAME.unpack(instance.data))
