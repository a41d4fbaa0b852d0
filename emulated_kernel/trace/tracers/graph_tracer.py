"""The function_graph tracer: hooks functions' entries and returns, and records those that are chosen."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from typing import Any

from emulated_kernel.arch.base import Arch
from emulated_kernel.errors import KernelError
from emulated_kernel.image.image import KernelImage
from emulated_kernel.kprobes.kprobes import Kprobes
from emulated_kernel.kprobes.return_hook.hook import Instance, ReturnHook
from emulated_kernel.kprobes.return_hook.hooks import ReturnHooks
from emulated_kernel.trace.array.system import Tracer
from emulated_kernel.trace.array.trace_array import TraceArray
from emulated_kernel.trace.hits.hit_context import HitContext
from emulated_kernel.trace.output.function_graph import GraphRecords
from emulated_kernel.trace.output.tracer_options import GraphOption
from emulated_kernel.trace.ring.trace_entry import EntryFlag, EntryType
from emulated_kernel.trace.tracers.function_filter import GraphSet
from emulated_kernel.trace.tracers.function_tracer import FilterWatcher, FunctionTracer
from emulated_kernel.trace.tracers.functions import Functions, FunctionWatcher
from emulated_kernel.trace.tracers.sleep_times import SleepTimes

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


class GraphTracer(Tracer, FunctionWatcher, FilterWatcher):
    """That of the top trace array, under the filters of its function tracer.

    It hooks calls by the array of each task, whatever kretprobes use.
    Mirrors: kernel/trace/trace_functions_graph.c, kernel/trace/fgraph.c:register_ftrace_graph (v6.1).
    """

    def __init__(
        self,
        kprobes: Kprobes,
        choose_hooks: Callable[[], ReturnHooks],
        functions: Functions,
        arch: Arch,
        array: TraceArray,
        filters: FunctionTracer,
        context: HitContext,
        sleeps: SleepTimes,
    ) -> None:
        """`choose_hooks` is called at each start for the hooks to use."""
        self.functions = GraphSet(functions, "all functions enabled")
        self.notrace = GraphSet(functions, "no functions disabled")
        functions.watch(self)
        filters.watch(self)
        self.max_depth = 0
        """Calls nested deeper aren't recorded; 0: all are."""
        self.threshold_ns = 0
        """tracing_thresh: only calls that took at least so long are recorded, by their returns alone."""
        self._sites = kprobes.sites
        self._ctlblk = kprobes.hits.ctlblk
        self._choose_hooks = choose_hooks
        self._site_size = arch.call_size
        self._filters = filters
        self._context = context
        self._sleeps = sleeps
        self._overruns: Counter[int] = Counter()
        """Of each task, the calls too deep to be followed."""
        self._array = array
        self._tasks = array.system.tasks
        self._now_ns = array.system.now_ns
        self._options = array.system.tracer_options
        self._records = GraphRecords.of(arch.word_size)
        self._hooked: frozenset[int] = frozenset()
        self._running: tuple[ReturnHooks, ReturnHook, Callable[[Any], None]] | None = None

    def set_max_depth(self, depth: int) -> None:
        """max_graph_depth, an unsigned int."""
        self.max_depth = depth & 0xFFFFFFFF

    # Hooking

    def start(self) -> None:
        """Raises: KernelError EOPNOTSUPP (no fentry sites), ENOMEM."""
        if self._sites is None:
            raise KernelError(errno.EOPNOTSUPP, "this kernel has no fentry sites")
        hooks = self._choose_hooks()
        hook = hooks.add(self._on_return, nodes=0, data_size=_FRAME.size)
        self._running = hooks, hook, self._entry_handler(hooks, hook)
        self._overruns.clear()
        self._sleeps.start()
        self.filters_changed()

    def stop(self) -> None:
        assert self._running is not None
        hooks, hook, _ = self._running
        self._hook(frozenset())
        hooks.remove(hook)
        self._sleeps.stop()
        self._running = None

    def filters_changed(self) -> None:
        """Hook what the filters leave, no more."""
        if self._running is not None:
            self._hook(frozenset(self._filters.selected()))

    def _hook(self, wanted: frozenset[int]) -> None:
        assert self._sites is not None
        assert self._running is not None
        entered = self._running[2]
        self._sites.remove(self._hooked - wanted, entered)
        self._sites.add(wanted - self._hooked, entered)
        self._hooked = wanted

    def module_came(self, module: str) -> None:
        """The filters, which hold here too, see to it."""

    def functions_went(self, sites: frozenset[int]) -> None:
        """They can't be traced any more."""
        self.functions.forget(sites)
        self.notrace.forget(sites)

    def _entry_handler(self, hooks: ReturnHooks, hook: ReturnHook) -> Callable[[Any], None]:
        """Mirrors: kernel/trace/fgraph.c:function_graph_enter (v6.1)."""
        ctlblk, site_size = self._ctlblk, self._site_size

        def entered(regs: Any) -> None:
            if not hooks.hook_call(hook, regs, wants):
                self._overruns[self._tasks.pid()] += 1

        def wants(instance: Instance, regs: Any) -> bool:
            parent = hooks.newest(hook)
            ctlblk.by_breakpoint = False
            frame = self._entered(regs.ip - site_size, None if parent is None else _read(parent), regs)
            if frame is not None:
                instance.data[:] = _pack(frame)
            return frame is not None

        return entered

    def _on_return(self, instance: Instance, regs: Any) -> None:
        self._ctlblk.by_breakpoint = False
        self._returned(_read(instance), regs)

    # Recording

    def _entered(self, func: int, parent: PendingCall | None, regs: Any) -> PendingCall | None:
        """A function begins, called by the one in `parent`; None where its return doesn't matter.

        Mirrors: trace_graph_entry (v6.1).
        """
        depth = 0 if parent is None else parent.depth + 1
        if parent is not None and parent.is_hidden:
            return None
        if func in self.notrace.addresses:
            return PendingCall(func, depth, is_hidden=True)
        in_irq = bool(self._context.hit_trace_ctx(regs)[0] & EntryFlag.HARDIRQ)
        pids, pid = self._filters.pids, self._tasks.pid()
        if (pids.is_active and pids.ignores(pid)) or self._ignores(func, parent, depth, in_irq=in_irq):
            return None
        now = self._now_ns()
        if not self.threshold_ns:
            self._record(EntryType.GRAPH_ENT, self._records.entered.pack(func, depth), regs, now)
        return PendingCall(func, depth, in_irq=in_irq, called_ns=now, slept_ns=self._sleeps.slept_ns(pid))

    def _ignores(self, func: int, parent: PendingCall | None, depth: int, *, in_irq: bool) -> bool:
        """Mirrors: ftrace_graph_ignore_func, ftrace_graph_ignore_irqs (v6.1)."""
        chosen = self.functions.addresses
        if (chosen and parent is None and func not in chosen) or 0 < self.max_depth <= depth:
            return True
        if not in_irq or self._options.is_on(GraphOption.IRQS):
            return False
        # What was asked for by name is recorded in interrupts too, with all that it calls.
        return func not in chosen and not (parent is not None and parent.in_irq)

    def _returned(self, frame: PendingCall, regs: Any) -> None:
        """Mirrors: trace_graph_return, trace_graph_thresh_return (v6.1)."""
        if frame.is_hidden:
            return
        now, pid = self._now_ns(), self._tasks.pid()
        called = frame.called_ns + self._sleeps.slept_ns(pid) - frame.slept_ns
        if now - called < self.threshold_ns:
            return
        payload = self._records.returned.pack(frame.func, frame.depth, self._overruns[pid], called, now)
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


def traceable_functions(image: KernelImage) -> dict[str, int]:
    """Those that can be traced, by name, in the order of their addresses."""
    found = ((image.kallsyms.lookup(site), site) for site in sorted(image.mcount))
    return {where.symbol.name: site for where, site in found if where is not None}
