"""FunctionGraph: hooks on entries and returns of the selected functions, for one GraphUser at a time."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from emulated_kernel.arch.program.ir_builder import EntryKind, ProgramBuilder
from emulated_kernel.kprobes.hit.entry_code import EntryCode
from emulated_kernel.kprobes.hit.ftrace_ops import FtraceOps
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.kprobes.return_hook.ret_stack import RetStack
from emulated_kernel.kprobes.return_hook.return_hook import RethookNode, ReturnHook
from emulated_kernel.kprobes.return_hook.return_hooks import ReturnHooks
from emulated_kernel.trace.array.services import TracingServices
from emulated_kernel.trace.compiled.graph import CALLED, CallKind, CompiledGraph, GraphEmitter
from emulated_kernel.trace.compiled.guest_addresses import GuestAddresses
from emulated_kernel.trace.tracers.function_tracer import FunctionTracer
from emulated_kernel.trace.tracers.sleep_times import SleepTimes
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass


class GraphUser(ABC):
    """Interface of an object that handles the entries and returns of functions, such as GraphTracer.

    At any time, at most one object of this class is registered as the user of the FunctionGraph.
    Mirrors: include/linux/ftrace.h:struct fgraph_ops (v6.1).
    """

    symbols: tuple[str, str]
    """Names of the Linux functions that correspond to entered() and returned(), for enabled_functions."""
    data_size: int
    """Size in bytes of the data that entered() returns, which are kept until the call returns.

    The u64 at offset CALLED (see compiled/graph.py) of the data is the start time of the call in ns.
    """

    @abstractmethod
    def entered(self, func: int, caller: RethookNode | None, regs: Any, /) -> bytes | None:
        """Handle the entry of `func`, and return the data to keep until the call's return is handled.

        Return None if the return need not be handled. `func`: address of the function's fentry site.
        `caller`: the innermost hooked call that the task has not returned from, or None if there is no such
        call. `regs`: the registers at the entry.
        """

    @abstractmethod
    def returned(self, instance: RethookNode, regs: Any, /) -> None:
        """Handle the return of a hooked call.

        `instance`: the call's node on the shadow stack, with the data that entered() returned. `regs`: the
        registers at the return.
        """

    def compiled(self) -> CompiledGraph | None:
        """Return the settings of guest code for entered() and returned(), or None if Python must run them."""
        return None


@dataclass(eq=False)
class _Running:
    """The registered GraphUser, with its hooks and guest code."""

    user: GraphUser
    hooks: ReturnHooks
    hook: ReturnHook
    ops: FtraceOps
    code: EntryCode[CallKind]
    compiled: CompiledGraph | None = None

    @property
    def stack(self) -> RetStack:
        assert isinstance(self.hooks.stack, RetStack)
        return self.hooks.stack


class FunctionGraph:
    """Hooks on entries and returns of the functions that the top array's function tracer selects.

    The hooked calls of a task are kept on the task's shadow stack.
    Mirrors: kernel/trace/fgraph.c (v6.1).
    """

    def __init__(
        self,
        kprobes: Kprobes,
        choose_hooks: Callable[[], ReturnHooks],
        system: TracingServices,
        filters: FunctionTracer,
        sleeps: SleepTimes,
        places: GuestAddresses,
    ) -> None:
        """Create an object without hooks, and subscribe to changes of the functions that `filters` selects.

        `choose_hooks` is called when a GraphUser is registered, and returns the return hooks to use.
        `places`: the addresses in the guest that compiled code uses.
        """
        filters.on_selection.append(self.filters_changed)
        self._sleeps = sleeps
        self._kprobes = kprobes
        self._sites = kprobes.sites
        self._choose_hooks = choose_hooks
        self._tasks = system.tasks
        self._filters = filters
        self._places = places
        self._arch = system.arch
        self._running: _Running | None = None

    def register(self, user: GraphUser) -> None:
        """Install the hooks for `user`.

        Raises: KernelError EOPNOTSUPP (no fentry sites), EBUSY (another GraphUser is registered), ENOMEM (no
        memory for the hooks).
        """
        if self._sites is None:
            raise KernelError(errno.EOPNOTSUPP, "function_graph: this kernel has no fentry sites")
        if self._running is not None:
            raise KernelError(
                errno.EBUSY, "function_graph: only it or the function profiler can run; stop the other one"
            )
        hooks = self._choose_hooks()
        hook = hooks.add(user.returned, nodes=0, data_size=user.data_size, program=self._emit_return)
        hook.follows_convention = True
        ops = FtraceOps(self._entered, lambda: "ftrace_graph_func", sub_symbols=user.symbols)
        running = _Running(user, hooks, hook, ops, self._kprobes.entry_code(ops))
        self._running = running
        running.stack.clear_overruns()
        self._sleeps.start(self._slept)
        self.filters_changed()

    def unregister(self) -> None:
        """Remove the hooks of the registered GraphUser.

        Returns of pending calls are not handled any more.
        """
        assert self._sites is not None
        assert self._running is not None
        running = self._running
        self._sites.detach(running.ops)
        self._drop_code(running)
        running.code.close()
        running.hooks.remove(running.hook)
        self._sleeps.stop()
        self._running = None

    def caller_of(self, instance: RethookNode) -> RethookNode | None:
        """Return the innermost hooked call from which the call of `instance` was made, perhaps indirectly.

        Return None if there is no such call.
        """
        assert self._running is not None
        return self._running.hooks.newest(instance.hook, before=instance.node)

    def overruns(self) -> int:
        """Return the number of calls of the current task that were nested too deep to be hooked.

        They are counted since the GraphUser was registered.
        """
        assert self._running is not None
        return self._running.stack.overruns(self._tasks.current())

    def filters_changed(self) -> None:
        """Attach the hooks to the functions that the filters select now, and detach them from all others."""
        if self._running is not None:
            assert self._sites is not None
            self.user_changed()
            running = self._running
            selected = self._filters.selected()
            settings = self._settings(running)
            if settings is not None:
                # New sites call the right jump at once, because writing all sites again takes long.
                # Old sites still call the jumps of the previous settings.
                running.code.prepare(selected, settings.by_kind)
            self._sites.attach(running.ops, selected)

    # Calls

    def _entered(self, site: int, regs: Any) -> None:
        """Pass a call of the function at `site` to entered(), and hook this call if entered() returns data.

        Mirrors: kernel/trace/fgraph.c:function_graph_enter (v6.1).
        """
        running = self._running
        if running is None:
            return
        hooks = running.hooks
        hook = running.hook
        user = running.user

        def wants(instance: RethookNode, regs: Any) -> bool:
            kept = user.entered(site, hooks.newest(hook), regs)
            if kept is not None:
                instance.data[:] = kept
            return kept is not None

        hooks.hook_call(hook, regs, wants)
        if running.code.may_make:
            self._compile(running)

    def _slept(self, task: int, nanoseconds: int) -> None:
        """Add the time for which `task` was off the CPU to the start times of the task's pending calls.

        `task`: address of the task_struct.
        """
        assert self._running is not None
        hook = self._running.hook
        stack = self._running.stack
        # Hazard: the memory of an ended task's task_struct may be in use for something else by now.
        for call in stack.pending(task) if stack.has_array(task) else ():
            if call.hook == hook.address:
                called = hook.data_of(call.node)[CALLED : CALLED + 8].cast("Q")
                called[0] += nanoseconds

    # In guest code

    def user_changed(self) -> None:
        """Drop the guest code, because compiled() of the registered GraphUser returns other settings now."""
        if self._running is not None:
            self._drop_code(self._running)

    def _drop_code(self, running: _Running) -> None:
        running.code.drop()
        if running.compiled is not None:
            running.compiled = None
            running.hooks.handler_changed(running.hook)

    def _settings(self, running: _Running) -> CompiledGraph | None:
        """Return the settings of the GraphUser's guest code, or None if Python must handle the calls."""
        may_compile = self._kprobes.compiler.may_compile and running.hooks.native is not None
        return running.user.compiled() if may_compile else None

    def _compile(self, running: _Running) -> None:
        """Compile guest code for each kind of function (CallKind), if the settings allow it.

        If there is no memory for the code, Python continues to handle the calls.
        """
        compiled = self._settings(running)
        running.compiled = compiled
        if compiled is None:
            running.code.is_settled = True
            return

        def emit(builder: ProgramBuilder, kind: CallKind) -> None:
            self._emitter(running, compiled, builder).entry(kind)

        if not running.code.make(running.ops.sites, compiled.by_kind, emit):
            self._drop_code(running)
            running.code.is_settled = True

    def _emit_return(self, builder: ProgramBuilder, _way: EntryKind) -> bool:
        running = self._running
        if running is None or running.compiled is None:
            return False
        self._emitter(running, running.compiled, builder).ends()
        return True

    def _emitter(self, running: _Running, compiled: CompiledGraph, builder: ProgramBuilder) -> GraphEmitter:
        native = running.hooks.native
        assert native is not None
        return GraphEmitter(builder, compiled, native, running.hook, self._places, self._arch)
