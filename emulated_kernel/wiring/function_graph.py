"""The function_graph tracer on fentry sites and return hooks."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
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
from emulated_kernel.trace.graph_tracer import Frame, GraphTracer
from emulated_kernel.trace.trace_array import TraceArray
from emulated_kernel.trace.trace_entry import EntryType
from emulated_kernel.wiring.context import HitContext
from emulated_kernel.wiring.probes import CPU, Tasks

_FRAME = Struct("<QqQ")
"""func, depth (~depth of a hidden one), called_ns."""


class FunctionGraphHooks:
    """Implements trace.graph_tracer.GraphHooks on the array of each task, whatever kretprobes use.

    Mirrors: kernel/trace/fgraph.c:register_ftrace_graph, function_graph_enter (v6.1).
    """

    def __init__(
        self,
        sites: FtraceSites | None,
        functions: Iterable[int],
        selected: Callable[[], set[int]],
        hooks: Callable[[], ReturnHooks],
        ctlblk: KprobeCtlblk,
        site_size: int,
    ) -> None:
        """`selected` tells which of the functions the filters leave.

        `hooks` gives those to use, asked at each start; `site_size` is the bytes of a call.
        """
        self._sites = sites
        self._functions = frozenset(functions)
        self._selected = selected
        self._hooked: frozenset[int] = frozenset()
        self._choose_hooks = hooks
        self._ctlblk = ctlblk
        self._site_size = site_size
        self._running: tuple[ReturnHooks, ReturnHook, Callable[[Any], None]] | None = None

    def start(self, graph: GraphTracer, /) -> None:
        """Raises: KernelError EOPNOTSUPP (no fentry sites), ENOMEM."""
        if self._sites is None:
            raise KernelError(errno.EOPNOTSUPP, "this kernel has no fentry sites")
        hooks = self._choose_hooks()
        hook = hooks.add(self._returned(graph), nodes=0, data_size=_FRAME.size)
        entered = self._entered(graph, hooks, hook)
        self._running = hooks, hook, entered
        self.refresh()

    def refresh(self) -> None:
        """The filters may have changed: hook what they leave, no more."""
        if self._running is not None:
            self._hook(self._functions & self._selected())

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
        self._running = None

    def _entered(self, graph: GraphTracer, hooks: ReturnHooks, hook: ReturnHook) -> Callable[[Any], None]:
        ctlblk, site_size = self._ctlblk, self._site_size

        def entered(regs: Any) -> None:
            parent = hooks.newest(hook)
            instance = hooks.try_get(hook)
            if instance is None:
                return
            ctlblk.by_breakpoint = False
            frame = graph.entered(regs.ip - site_size, None if parent is None else _read(parent), regs)
            if frame is None:
                hooks.recycle(instance)
                return
            depth = ~frame.depth if frame.is_hidden else frame.depth
            instance.data[:] = _FRAME.pack(frame.func, depth, frame.called_ns)
            hooks.hook(instance, regs)

        return entered

    def _returned(self, graph: GraphTracer) -> Callable[[Instance, Any], None]:
        ctlblk = self._ctlblk

        def returned(instance: Instance, regs: Any) -> None:
            ctlblk.by_breakpoint = False
            graph.returned(_read(instance), regs)

        return returned


def _read(instance: Instance) -> Frame:
    func, depth, called_ns = _FRAME.unpack(instance.data)
    return Frame(func, max(depth, ~depth), depth < 0, called_ns)


def build_function_graph(
    kprobes: Kprobes,
    hooks: Callable[[], ReturnHooks],
    image: KernelImage,
    arch: Arch,
    array: TraceArray,
    filters: FunctionTracer,
    tasks: Tasks,
    context: HitContext,
    now_ns: Callable[[], int],
) -> GraphTracer:
    """The tracer of the top trace array, under the filters of its function tracer."""
    functions = traceable_functions(image)
    graph_hooks = FunctionGraphHooks(
        kprobes.sites, functions.values(), filters.selected, hooks, kprobes.hits.ctlblk, arch.jump_size
    )
    filters.on_filter = graph_hooks.refresh

    def record(kind: EntryType, payload: bytes, regs: Any, stamp: int) -> None:
        flags, preempt_count = context.of(regs)
        task = tasks.context()
        array.record(
            kind,
            payload,
            cpu=CPU,
            pid=task.pid,
            comm=task.comm,
            flags=flags,
            preempt_count=preempt_count,
            timestamp_ns=stamp,
        )

    return GraphTracer(functions, graph_hooks, record, now_ns, arch.word_size)


def traceable_functions(image: KernelImage) -> dict[str, int]:
    """Those that can be traced, by name, in the order of their addresses."""
    found = ((image.kallsyms.lookup(site), site) for site in sorted(image.mcount))
    return {where.symbol.name: site for where, site in found if where is not None}
