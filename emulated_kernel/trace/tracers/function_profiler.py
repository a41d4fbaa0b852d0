"""The function profiler: the number and the durations of the calls of each function on each CPU."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any

from emulated_kernel.kprobes.return_hook.return_hook import RethookNode
from emulated_kernel.trace.array.services import TracingServices
from emulated_kernel.trace.output.graph_output import duration_text
from emulated_kernel.trace.output.tracer_options import GraphOption
from emulated_kernel.trace.tracers.fgraph import FunctionGraph, GraphUser
from emulated_kernel.util.fast_dataclass import dataclass

_U64 = (1 << 64) - 1
_CALL = Struct("<QQQ")
"""Format of a call's data on the shadow stack: func, calltime, subtime.

Times are in nanoseconds. As in the data of every GraphUser, calltime is at offset CALLED. subtime is the time
that calls made by this call have taken.
"""
_HEADER = """\
  Function                               Hit    Time            Avg             s^2
  --------                               ---    ----            ---             ---
"""


@dataclass(eq=False, slots=True)
class _Profile:
    """Statistics of one function on one CPU. Mirrors: kernel/trace/ftrace.c:struct ftrace_profile (v6.1)."""

    func: int
    counter: int = 0
    time_ns: int = 0
    time_squared: int = 0

    def variance(self) -> int:
        """Return the variance s^2 of the durations in thousandths of a square microsecond.

        The result is 0 for fewer than two calls.
        Mirrors: kernel/trace/ftrace.c:function_stat_show (v6.1).
        """
        n = self.counter
        if n <= 1:
            return 0
        return (n * self.time_squared - self.time_ns**2 & _U64) // (n * (n - 1) * 1000)


class FunctionProfiler(GraphUser):
    """The function profiler, for the files function_profile_enabled and trace_stat/function*.

    Callers hold the control lock.
    Mirrors: kernel/trace/ftrace.c, CONFIG_FUNCTION_PROFILER with CONFIG_FUNCTION_GRAPH_TRACER (v6.1).
    """

    symbols = ("profile_graph_entry", "profile_graph_return")
    data_size = _CALL.size

    def __init__(
        self, graph: FunctionGraph, system: TracingServices, threshold_ns: Callable[[], int]
    ) -> None:
        """Create empty profiles. `threshold_ns` returns the value of tracing_thresh.

        Functions whose average duration is below the threshold are not shown.
        """
        self.is_enabled = False
        self._graph = graph
        self._system = system
        self._threshold_ns = threshold_ns
        self._by_cpu: list[dict[int, _Profile]] = [{} for _ in range(system.cpus)]

    def enable(self, value: int) -> None:
        """Start the profiler with empty profiles, or stop it if `value` is 0.

        If the profiler is running already and `value` is not 0, do nothing.
        Raises: errors of FunctionGraph.register().
        """
        if bool(value) is self.is_enabled:
            return
        if value:
            for profiles in self._by_cpu:
                profiles.clear()
            self._graph.register(self)
        else:
            self._graph.unregister()
        self.is_enabled = bool(value)

    def entered(self, func: int, caller: RethookNode | None, regs: Any) -> bytes:
        """Count a call of `func` on the current CPU, and return the data that returned() needs.

        `caller`, `regs`: see GraphUser.entered().
        The data is a _CALL: the function, the current time, and 0 as the time spent in calls made by this
        call.
        Mirrors: kernel/trace/ftrace.c:profile_graph_entry, function_profile_call (v6.1).
        """
        del caller, regs
        profiles = self._by_cpu[self._system.tasks.cpu()]
        profiles.setdefault(func, _Profile(func)).counter += 1
        return _CALL.pack(func, self._system.now_ns(), 0)

    def returned(self, instance: RethookNode, regs: Any) -> None:
        """Add the duration of a returning call to the total of the called function.

        If option graph-time is off, the time of calls made by this call does not count. `instance`, `regs`:
        see GraphUser.returned().
        Mirrors: kernel/trace/ftrace.c:profile_graph_return (v6.1).
        """
        del regs
        tasks = self._system.tasks
        func, called, below = _CALL.unpack(instance.data)
        took = self._system.now_ns() - called
        if not self._system.tracer_options.is_on(GraphOption.GRAPH_TIME):
            caller = self._graph.caller_of(instance)
            if caller is not None:
                *own, before = _CALL.unpack(caller.data)
                caller.data[:] = _CALL.pack(*own, before + took)
            took = max(0, took - below)
        profile = self._by_cpu[tasks.cpu()].get(func)
        if profile is not None:
            profile.time_ns += took
            profile.time_squared += took * took

    def text(self, cpu: int) -> str:
        """Return the text of trace_stat/functionN for a CPU, sorted by total time, longest first.

        Mirrors: kernel/trace/ftrace.c:function_stat_headers, function_stat_show,
        kernel/trace/trace_stat.c:insert_stat (v6.1).
        """
        lines = [_HEADER]
        # Linux: among functions with equal times, the one that was called first comes last.
        latest_first = list(self._by_cpu[cpu].values())[::-1]
        for profile in sorted(latest_first, key=lambda each: -each.time_ns):
            average = profile.time_ns // profile.counter
            if average < self._threshold_ns():
                continue
            where = self._system.symbols.lookup(profile.func)
            name = "" if where is None else where.name
            times = [duration_text(ns) for ns in (profile.time_ns, average, profile.variance())]
            lines.append(f"  {name[:30]:<30}  {profile.counter:10d}    {'    '.join(times)}\n")
        return "".join(lines)
