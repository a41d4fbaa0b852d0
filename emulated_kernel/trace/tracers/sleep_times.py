"""How long tasks were off the CPU, which the function graph may leave out of what a call took."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from emulated_kernel.trace.events.registry import EventRegistry
from emulated_kernel.trace.events.static_event import Tracepoint
from emulated_kernel.trace.events.tracepoints import Tracepoints
from emulated_kernel.trace.hits.probe_hit import ProbeHit, Tasks
from emulated_kernel.trace.output.tracer_options import GraphOption, TracerOptions
from emulated_kernel.trace.ring.trace_entry import COMMON_SIZE, EventField

Slept = Callable[[int, int], None]
"""Told of a task_struct's address, and of the nanoseconds that it was off the CPU."""


class SleepTimes:
    """How long tasks were off the CPU while option sleep-time was off.

    Mirrors: kernel/trace/fgraph.c:ftrace_graph_probe_sched_switch (v6.1).
    """

    def __init__(
        self,
        switches: Tracepoint | None,
        fields: Sequence[EventField],
        options: TracerOptions,
        now_ns: Callable[[], int],
        tasks: Tasks,
    ) -> None:
        """`switches` is sched_switch, None in an image without events; `fields` are its records'."""
        self._switches = switches
        self._places = {field.name: slice(field.offset, field.offset + field.size) for field in fields}
        self._options = options
        self._now_ns = now_ns
        self._tasks = tasks
        self._slept: Slept = _ignore
        self._left: dict[tuple[int, int], tuple[int, int]] = {}
        """By pid, and of idle tasks, which share one, by CPU: its task_struct, and when it left."""

    def start(self, slept: Slept) -> None:
        """Watch the scheduler."""
        self._left.clear()
        self._slept = slept
        if self._switches is not None:
            self._switches.subscribe(self._switched)

    def stop(self) -> None:
        """Let it be."""
        if self._switches is not None:
            self._switches.unsubscribe(self._switched)

    def _switched(self, payload: bytes, _hit: ProbeHit) -> None:
        if self._options.is_on(GraphOption.SLEEP_TIME):
            return
        now = self._now_ns()
        self._left[self._key(payload, "prev_pid")] = self._tasks.current(), now
        came = self._left.get(self._key(payload, "next_pid"))
        if came is not None:
            task, left = came
            self._slept(task, now - left)

    def _key(self, payload: bytes, name: str) -> tuple[int, int]:
        pid = int.from_bytes((bytes(COMMON_SIZE) + payload)[self._places[name]], "little")
        return pid, 0 if pid else self._tasks.cpu()


def _ignore(_task: int, _nanoseconds: int) -> None:
    """Nobody asks."""


def build_sleep_times(
    points: Tracepoints,
    events: EventRegistry,
    options: TracerOptions,
    now_ns: Callable[[], int],
    tasks: Tasks,
) -> SleepTimes:
    """Those of a kernel with these tracepoints."""
    event = events.find("sched", "sched_switch")
    fields = () if event is None else event.fields
    return SleepTimes(points.by_name.get("sched:sched_switch"), fields, options, now_ns, tasks)
