"""SleepTimes: measures how long tasks are off the CPU, so that durations of calls can exclude this time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from emulated_kernel.trace.array.services import TracingServices
from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.events.static_event import Tracepoint
from emulated_kernel.trace.output.tracer_options import GraphOption
from emulated_kernel.trace.ring.trace_entry import COMMON_SIZE

Slept = Callable[[int, int], None]
"""Handler that is called when a task returns to a CPU.

Its arguments are the address of the task_struct, and the number of nanoseconds that the task was off the
CPU.
"""


class SleepTimes:
    """Measures the time that tasks are off the CPU, while option sleep-time is off.

    Mirrors: kernel/trace/fgraph.c:ftrace_graph_probe_sched_switch (v6.1).
    """

    def __init__(self, points: Mapping[str, Tracepoint], system: TracingServices) -> None:
        """Create an object that measures nothing before start() is called.

        `points` maps GROUP:EVENT -> tracepoint of the kernel. If it has no sched_switch, nothing is ever
        measured.
        """
        event = system.events.find("sched", "sched_switch")
        fields = () if event is None else event.fields
        self._places = {field.name: slice(field.offset, field.offset + field.size) for field in fields}
        self._switches = points.get("sched:sched_switch")
        self._options = system.tracer_options
        self._now_ns = system.now_ns
        self._tasks = system.tasks
        self._slept: Slept | None = None
        self._is_watching = False
        self._options.on_switch.append(self._follow)
        self._left: dict[tuple[int, int], tuple[int, int]] = {}
        """Task that is off the CPU -> address of its task_struct, and time in ns when it left the CPU.

        The key is (pid, 0), or (0, CPU) for an idle task.
        """

    def start(self, slept: Slept) -> None:
        """From now on, call `slept` when a task comes back to a CPU while option sleep-time is off.

        Deviates: Linux watches sched_switch even if the option is on, which only costs time.
        """
        self._slept = slept
        self._follow()

    def stop(self) -> None:
        """Stop calling `slept`, and stop watching sched_switch."""
        self._slept = None
        self._follow()

    def _follow(self) -> None:
        wanted = self._slept is not None and not self._options.is_on(GraphOption.SLEEP_TIME)
        if self._switches is None or wanted is self._is_watching:
            return
        self._is_watching = wanted
        self._left.clear()
        if wanted:
            self._switches.subscribe(self._switched)
        else:
            self._switches.unsubscribe(self._switched)

    def _switched(self, payload: bytes, _hit: ProbeHit) -> None:
        assert self._slept is not None
        now = self._now_ns()
        self._left[self._key(payload, "prev_pid")] = self._tasks.current(), now
        came = self._left.get(self._key(payload, "next_pid"))
        if came is not None:
            task, left = came
            self._slept(task, now - left)

    def _key(self, payload: bytes, name: str) -> tuple[int, int]:
        pid = int.from_bytes((bytes(COMMON_SIZE) + payload)[self._places[name]], "little")
        return pid, 0 if pid else self._tasks.cpu()
