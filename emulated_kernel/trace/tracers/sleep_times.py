"""How long tasks were off the CPU, which the function graph may leave out of what a call took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from emulated_kernel.trace.events.registry import EventRegistry
from emulated_kernel.trace.events.static_event import Tracepoint
from emulated_kernel.trace.events.tracepoints import Tracepoints
from emulated_kernel.trace.hits.probe_hit import ProbeHit
from emulated_kernel.trace.output.tracer_options import GraphOption, TracerOptions
from emulated_kernel.trace.ring.trace_entry import COMMON_SIZE, EventField


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
    ) -> None:
        """`switches` is sched_switch, None in an image without events; `fields` are its records'."""
        self._switches = switches
        self._places = {field.name: slice(field.offset, field.offset + field.size) for field in fields}
        self._options = options
        self._now_ns = now_ns
        self._slept: Counter[int] = Counter()
        self._left_ns: dict[int, int] = {}

    def start(self) -> None:
        """Watch the scheduler."""
        self._slept.clear()
        self._left_ns.clear()
        if self._switches is not None:
            self._switches.subscribe(self._switched)

    def stop(self) -> None:
        """Let it be."""
        if self._switches is not None:
            self._switches.unsubscribe(self._switched)

    def slept_ns(self, pid: int) -> int:
        """Nanoseconds since start()."""
        return self._slept[pid]

    def _switched(self, payload: bytes, _hit: ProbeHit) -> None:
        if self._options.is_on(GraphOption.SLEEP_TIME):
            return
        now = self._now_ns()
        self._left_ns[self._pid(payload, "prev_pid")] = now
        comes = self._pid(payload, "next_pid")
        left = self._left_ns.get(comes)
        if left is not None:
            self._slept[comes] += now - left

    def _pid(self, payload: bytes, name: str) -> int:
        return int.from_bytes((bytes(COMMON_SIZE) + payload)[self._places[name]], "little")


def build_sleep_times(
    points: Tracepoints, events: EventRegistry, options: TracerOptions, now_ns: Callable[[], int]
) -> SleepTimes:
    """Those of a kernel with these tracepoints."""
    event = events.find("sched", "sched_switch")
    fields = () if event is None else event.fields
    return SleepTimes(points.by_name.get("sched:sched_switch"), fields, options, now_ns)
