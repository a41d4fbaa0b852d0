"""What histograms share: names, variables, and the synthetic events that their actions fire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from emulated_kernel.trace.event import EventRegistry, TraceEvent
from emulated_kernel.trace.ports import Recorder
from emulated_kernel.trace.synth.event import SYSTEM, SyntheticEvent

if TYPE_CHECKING:
    from emulated_kernel.trace.hist.actions import TrackedSnapshot
    from emulated_kernel.trace.hist.data import HistData
    from emulated_kernel.trace.hist.trigger import HistTrigger


@dataclass
class HistSystem:
    """The histograms of a kernel, in all its trace arrays."""

    registry: EventRegistry
    syscall_name: Callable[[int], str | None] = lambda _number: None
    """The name of a system call, such as sys_read."""
    named: list[HistTrigger] = field(default_factory=list)
    """Those with a name, newest first."""
    snapshots: dict[Recorder, TrackedSnapshot] = field(default_factory=dict)
    """Of each trace array, who takes its snapshots under a condition."""
    _with_variables: dict[Recorder, list[HistData]] = field(default_factory=dict)

    def find_synthetic(self, name: str) -> SyntheticEvent | None:
        """The synthetic event of that name."""
        return self.synthetic_of(self.registry.find(SYSTEM, name))

    def find_named(self, name: str | None) -> HistTrigger | None:
        """The trigger that owns the data of all of that name. Mirrors: find_named_trigger (v6.1)."""
        if name is None:
            return None
        return next((each for each in self.named if each.shared is None and each.name == name), None)

    def with_variables(self, recorder: Recorder) -> Sequence[HistData]:
        """A trace array's histograms that define or use variables, newest first."""
        return self._with_variables.get(recorder, ())

    def save_variables(self, data: HistData) -> None:
        """Let others find its variables. Mirrors: save_hist_vars (v6.1)."""
        listed = self._with_variables.setdefault(data.setting.triggers.recorder, [])
        if data not in listed:
            listed.insert(0, data)

    def remove_variables(self, data: HistData) -> None:
        """Mirrors: remove_hist_vars (v6.1)."""
        listed = self._with_variables.get(data.setting.triggers.recorder, [])
        if data in listed:
            listed.remove(data)

    @staticmethod
    def synthetic_of(event: TraceEvent | None) -> SyntheticEvent | None:
        """The event itself, if it is a synthetic one. Mirrors: find_synth_event_call (v6.1)."""
        return event if isinstance(event, SyntheticEvent) else None
