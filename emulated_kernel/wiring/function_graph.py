"""The function_graph tracer on fentry sites and return hooks."""

from __future__ import annotations

import errno
from collections.abc import Callable
from struct import Struct
from typing import Any

from emulated_kernel.arch.base import Arch
from emulated_kernel.errors import KernelError
from emulated_kernel.image.image import KernelImage
from emulated_kernel.kprobes.ctlblk import KprobeCtlblk
from emulated_kernel.kprobes.ftrace import FtraceSites
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.kprobes.return_hook.hooks import Instance, ReturnHook, ReturnHooks
from emulated_kernel.trace.function_tracer import FunctionTracer
from emulated_kernel.trace.functions import Functions
from emulated_kernel.trace.graph_tracer import Frame, GraphTracer
from emulated_kernel.trace.trace_array import TraceArray
from emulated_kernel.trace.trace_entry import EntryType
from emulated_kernel.wiring.context import HitContext
from emulated_kernel.wiring.graph_moment import KernelGraphMoment, SleepTimes
from emulated_kernel.wiring.probes import Tasks

_FRAME = Struct("<Qi??QQ")
"""The fields of a Frame."""


class FunctionGraphHooks:
    """Implements trace.graph_tracer.GraphHooks on the array of each task, whatever kretprobes use.

    Mirrors: kernel/trace/fgraph.c:register_ftrace_graph, function_graph_enter (v6.1).
    """

    def __init__(
        self,
        sites: FtraceSites | None,
        selected: Callable[[], set[int]],
        hooks: Callable[[], ReturnHooks],
        ctlblk: KprobeCtlblk,
        site_size: int,
        moment: KernelGraphMoment,
    ) -> None:
        """`selected` tells which functions the filters leave.

        `hooks` gives those to use, asked at each start; `site_size` is the bytes of a call.
        """
        self._sites = sites
        self._selected = selected
        self._hooked: frozenset[int] = frozenset()
        self._choose_hooks = hooks
        self._ctlblk = ctlblk
        self._site_size = site_size
        self._moment = moment
        self._running: tuple[ReturnHooks, ReturnHook, Callable[[Any], None]] | None = None

    def start(self, graph: GraphTracer, /) -> None:
        """Raises: KernelError EOPNOTSUPP (no fentry sites), ENOMEM."""
        if self._sites is None:
            raise KernelError(errno.EOPNOTSUPP, "this kernel has no fentry sites")
        hooks = self._choose_hooks()
        hook = hooks.add(self._returned(graph), nodes=0, data_size=_FRAME.size)
        entered = self._entered(graph, hooks, hook)
        self._running = hooks, hook, entered
        self._moment.start()
        self.refresh()

    def refresh(self) -> None:
        """The filters may have changed: hook what they leave, no more."""
        if self._running is not None:
            self._hook(frozenset(self._selected()))

    def _hook(self, wanted: frozenset[int]) -> None:
        assert self._sites is not None
        assert self._running is not None
        entered = self._running[2]
        self._sites.remove(self._hooked - wanted, entered)
        self._sites.add(wanted - self._hooked, entered)
        self._hooked = wanted

    def stop(self) -> None:
        assert self._running is not None
        hooks, hook, _ = self._running
        self._hook(frozenset())
        hooks.remove(hook)
        self._moment.stop()
        self._running = None

    def _entered(self, graph: GraphTracer, hooks: ReturnHooks, hook: ReturnHook) -> Callable[[Any], None]:
        ctlblk, site_size = self._ctlblk, self._site_size

        def entered(regs: Any) -> None:
            parent = hooks.newest(hook)
            instance = hooks.try_get(hook)
            if instance is None:
                graph.overran()
                return
            ctlblk.by_breakpoint = False
            frame = graph.entered(regs.ip - site_size, None if parent is None else _read(parent), regs)
            if frame is None:
                hooks.recycle(instance)
                return
            instance.data[:] = _pack(frame)
            hooks.hook(instance, regs)

        return entered

    def _returned(self, graph: GraphTracer) -> Callable[[Instance, Any], None]:
        ctlblk = self._ctlblk

        def returned(instance: Instance, regs: Any) -> None:
            ctlblk.by_breakpoint = False
            graph.returned(_read(instance), regs)

        return returned


def _pack(frame: Frame) -> bytes:
    flags = frame.is_hidden, frame.in_irq
    return _FRAME.pack(frame.func, frame.depth, *flags, frame.called_ns, frame.slept_ns)


def _read(instance: Instance) -> Frame:
    return Frame(*_FRAME.unpack(instance.data))


def build_function_graph(
    kprobes: Kprobes,
    hooks: Callable[[], ReturnHooks],
    functions: Functions,
    arch: Arch,
    array: TraceArray,
    filters: FunctionTracer,
    tasks: Tasks,
    context: HitContext,
    sleeps: SleepTimes,
) -> GraphTracer:
    """The tracer of the top trace array, under the filters of its function tracer."""
    system = array.system
    moment = KernelGraphMoment(context, tasks, filters.pids, sleeps)
    graph_hooks = FunctionGraphHooks(
        kprobes.sites, filters.selected, hooks, kprobes.hits.ctlblk, arch.call_size, moment
    )
    filters.on_filter = graph_hooks.refresh

    def record(kind: EntryType, payload: bytes, regs: Any, stamp: int) -> None:
        flags, preempt_count = context.of(regs)
        task = tasks.context()
        array.record(
            kind,
            payload,
            cpu=task.cpu,
            pid=task.pid,
            comm=task.comm,
            flags=flags,
            preempt_count=preempt_count,
            timestamp_ns=stamp,
        )

    return GraphTracer(
        functions, graph_hooks, record, moment, system.tracer_options, system.now_ns, arch.word_size
    )


def traceable_functions(image: KernelImage) -> dict[str, int]:
    """Those that can be traced, by name, in the order of their addresses."""
    found = ((image.kallsyms.lookup(site), site) for site in sorted(image.mcount))
    return {where.symbol.name: site for where, site in found if where is not None}
