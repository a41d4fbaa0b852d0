"""FunctionGraph: hooks entries and returns of the functions that filters leave, for one user at a time."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any

from emulated_kernel.arch.analysis.tables import ProbedTables
from emulated_kernel.errors import KernelError
from emulated_kernel.kprobes.ftrace import Called, FtraceOps
from emulated_kernel.kprobes.kprobes import Kprobes
from emulated_kernel.kprobes.return_hook.hook import Instance, ReturnHook
from emulated_kernel.kprobes.return_hook.hooks import ReturnHooks
from emulated_kernel.trace.array.system import TraceSystem
from emulated_kernel.trace.tracers.function_tracer import FilterWatcher, FunctionTracer
from emulated_kernel.trace.tracers.sleep_times import SleepTimes


class GraphUser(ABC):
    """Who wants to know of calls and their ends. Mirrors: struct fgraph_ops (v6.1)."""

    data_size: int
    """Bytes that it keeps of each call."""

    @abstractmethod
    def entered(self, func: int, caller: Instance | None, regs: Any, /) -> bytes | None:
        """A function begins; `caller` is the newest call awaited. What to keep, None if not to be awaited."""

    @abstractmethod
    def returned(self, instance: Instance, regs: Any, /) -> None:
        """A call that was awaited ends."""


class FunctionGraph(FilterWatcher):
    """Under the filters of the top array's function tracer, by the array of each task.

    Mirrors: kernel/trace/fgraph.c (v6.1).
    """

    def __init__(
        self,
        kprobes: Kprobes,
        choose_hooks: Callable[[], ReturnHooks],
        system: TraceSystem,
        filters: FunctionTracer,
        sleeps: SleepTimes,
    ) -> None:
        """`choose_hooks` is called at each start for the hooks to use."""
        filters.watch(self)
        self.overruns: Counter[int] = Counter()
        """Of each task, the calls too deep to be followed."""
        self.sleeps = sleeps
        self._sites = kprobes.sites
        self._ctlblk = kprobes.hits.ctlblk
        self._choose_hooks = choose_hooks
        self._tasks = system.tasks
        self._filters = filters
        self._running: tuple[ReturnHooks, ReturnHook, FtraceOps] | None = None

    def register(self, user: GraphUser) -> None:
        """Raises: KernelError EOPNOTSUPP (no fentry sites), EBUSY (another user), ENOMEM."""
        if self._sites is None:
            raise KernelError(errno.EOPNOTSUPP, "this kernel has no fentry sites")
        if self._running is not None:
            raise KernelError(errno.EBUSY, "function_graph and the function profiler exclude each other")
        hooks = self._choose_hooks()

        def returned(instance: Instance, regs: Any) -> None:
            self._ctlblk.by_breakpoint = False
            user.returned(instance, regs)

        hook = hooks.add(returned, nodes=0, data_size=user.data_size)
        self._running = hooks, hook, FtraceOps(self._entry_handler(hooks, hook, user))
        self.overruns.clear()
        self.sleeps.start()
        self.filters_changed()

    def unregister(self) -> None:
        """Calls that are pending are awaited no more."""
        assert self._sites is not None
        assert self._running is not None
        hooks, hook, ops = self._running
        self._sites.detach(ops)
        hooks.remove(hook)
        self.sleeps.stop()
        self._running = None

    def caller_of(self, instance: Instance) -> Instance | None:
        """The awaited call that made this one, be it by way of others."""
        assert self._running is not None
        return self._running[0].newest(instance.hook, before=instance.node)

    def filters_changed(self) -> None:
        """Hook what the filters leave, no more."""
        if self._running is not None:
            assert self._sites is not None
            self._sites.attach(self._running[2], self._filters.selected())

    def _entry_handler(self, hooks: ReturnHooks, hook: ReturnHook, user: GraphUser) -> Called:
        """Mirrors: kernel/trace/fgraph.c:function_graph_enter (v6.1)."""

        def entered(site: int, regs: Any) -> None:
            def wants(instance: Instance, regs: Any) -> bool:
                kept = user.entered(site, hooks.newest(hook), regs)
                if kept is not None:
                    instance.data[:] = kept
                return kept is not None

            if not hooks.hook_call(hook, regs, wants):
                self.overruns[self._tasks.pid()] += 1

        return entered


def traceable_functions(image: ProbedTables) -> dict[str, int]:
    """Those that can be traced, by name, in the order of their addresses."""
    found = ((image.kallsyms.lookup(site), site) for site in sorted(image.mcount))
    return {where.symbol.name: site for where, site in found if where is not None}
