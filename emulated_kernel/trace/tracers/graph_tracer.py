"""The function_graph tracer: records calls as a tree, those that are chosen."""

from __future__ import annotations

from struct import Struct
from typing import Any

from emulated_kernel.dataclass import dataclass
from emulated_kernel.kprobes.return_hook.hook import Instance
from emulated_kernel.trace.array.system import Tracer
from emulated_kernel.trace.array.trace_array import TraceArray
from emulated_kernel.trace.events.event_pids import EventPids
from emulated_kernel.trace.hits.hit_context import HitContext
from emulated_kernel.trace.output.function_graph import GraphRecords
from emulated_kernel.trace.output.tracer_options import GraphOption
from emulated_kernel.trace.ring.trace_entry import EntryFlag, EntryType
from emulated_kernel.trace.tracers.function_filter import GraphSet
from emulated_kernel.trace.tracers.function_graph import FunctionGraph, GraphUser
from emulated_kernel.trace.tracers.functions import Functions, FunctionWatcher

_FRAME = Struct("<Qi??QQ")
"""The fields of a PendingCall."""


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call that hasn't returned; what its task's shadow stack keeps of it."""

    func: int
    depth: int
    is_hidden: bool = False
    """In set_graph_notrace: neither it nor what it calls is recorded."""
    in_irq: bool = False
    """Called in a hard interrupt."""
    called_ns: int = 0
    slept_ns: int = 0
    """What its task had slept by then; see SleepTimes.slept_ns."""


class GraphTracer(Tracer, FunctionWatcher, GraphUser):
    """That of the top trace array. Mirrors: kernel/trace/trace_functions_graph.c (v6.1)."""

    data_size = _FRAME.size

    def __init__(
        self,
        graph: FunctionGraph,
        functions: Functions,
        array: TraceArray,
        pids: EventPids,
        context: HitContext,
    ) -> None:
        """`pids`: set_ftrace_pid of the function tracer."""
        self.functions = GraphSet(functions, "all functions enabled")
        self.notrace = GraphSet(functions, "no functions disabled")
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
        self._records = GraphRecords.of(array.system.arch.word_size)

    def set_max_depth(self, depth: int) -> None:
        """max_graph_depth, an unsigned int."""
        self.max_depth = depth & 0xFFFFFFFF

    def start(self) -> None:
        """Raises: KernelError as FunctionGraph.register()."""
        self._graph.register(self)

    def stop(self) -> None:
        self._graph.unregister()

    def module_came(self, module: str) -> None:
        """The filters, which hold here too, see to it."""

    def functions_went(self, sites: frozenset[int]) -> None:
        """They can't be traced any more."""
        self.functions.forget(sites)
        self.notrace.forget(sites)

    # Recording

    def entered(self, func: int, caller: Instance | None, regs: Any) -> bytes | None:
        """See GraphUser. Mirrors: trace_graph_entry (v6.1)."""
        frame = self._frame(func, None if caller is None else _read(caller), regs)
        return None if frame is None else _pack(frame)

    def _frame(self, func: int, parent: PendingCall | None, regs: Any) -> PendingCall | None:
        """What is kept of a call by the function in `parent`; None where its return doesn't matter."""
        depth = 0 if parent is None else parent.depth + 1
        if parent is not None and parent.is_hidden:
            return None
        if func in self.notrace.addresses:
            return PendingCall(func, depth, is_hidden=True)
        in_irq = bool(self._context.hit_trace_ctx(regs)[0] & EntryFlag.HARDIRQ)
        pids, pid = self._pids, self._tasks.pid()
        if (pids.is_active and pids.ignores(pid)) or self._ignores(func, parent, depth, in_irq=in_irq):
            return None
        now = self._now_ns()
        if not self.threshold_ns:
            self._record(EntryType.GRAPH_ENT, self._records.entered.pack(func, depth), regs, now)
        return PendingCall(
            func, depth, in_irq=in_irq, called_ns=now, slept_ns=self._graph.sleeps.slept_ns(pid)
        )

    def _ignores(self, func: int, parent: PendingCall | None, depth: int, *, in_irq: bool) -> bool:
        """Mirrors: ftrace_graph_ignore_func, ftrace_graph_ignore_irqs (v6.1)."""
        chosen = self.functions.addresses
        if (chosen and parent is None and func not in chosen) or 0 < self.max_depth <= depth:
            return True
        if not in_irq or self._options.is_on(GraphOption.IRQS):
            return False
        # What was asked for by name is recorded in interrupts too, with all that it calls.
        return func not in chosen and not (parent is not None and parent.in_irq)

    def returned(self, instance: Instance, regs: Any) -> None:
        """See GraphUser. Mirrors: trace_graph_return, trace_graph_thresh_return (v6.1)."""
        frame = _read(instance)
        if frame.is_hidden:
            return
        now, pid = self._now_ns(), self._tasks.pid()
        called = frame.called_ns + self._graph.sleeps.slept_ns(pid) - frame.slept_ns
        if now - called < self.threshold_ns:
            return
        payload = self._records.returned.pack(frame.func, frame.depth, self._graph.overruns[pid], called, now)
        self._record(EntryType.GRAPH_RET, payload, regs, now)

    def _record(self, kind: EntryType, payload: bytes, regs: Any, stamp: int) -> None:
        flags, preempt_count = self._context.hit_trace_ctx(regs)
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


def _pack(frame: PendingCall) -> bytes:
    flags = frame.is_hidden, frame.in_irq
    return _FRAME.pack(frame.func, frame.depth, *flags, frame.called_ns, frame.slept_ns)


def _read(instance: Instance) -> PendingCall:
    return PendingCall(*_FRAME.unpack(instance.data))
