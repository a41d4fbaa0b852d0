"""PastHist: a histogram that a mount's kernel has or has had, for hints at the end of `run`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.lazy_pattern import lazy_pattern

_SYNTHETIC = "synthetic/"
"""Group of all synthetic events, with its slash."""
_HIST = lazy_pattern(
    r"^# trigger info: (.*) \[\w+\]$(?:(?!^# trigger info: )[^\n]*\n)*?^Totals:\n +Hits: (\d+)$", re.MULTILINE
)
"""Pattern for a histogram in a `hist` file; its groups are the trigger without its state, and the hits."""


@dataclass(frozen=True)
class PastHist:
    """A histogram that exists, or has existed before it was removed or cleared.

    The attributes are named like keys of machine/history.
    """

    array: str
    """Name of the trace array; "" for the top array."""
    event: str
    """The event as GROUP/EVENT."""
    trigger: str
    """The histogram's line in the trigger file, without its state."""
    hits: int

    @property
    def synthetic(self) -> str:
        """Name of the event if the event is synthetic, otherwise ""."""
        return self.event.removeprefix(_SYNTHETIC) if self.event.startswith(_SYNTHETIC) else ""


def present_hists(tracefs: Path) -> Iterator[PastHist]:
    """Yield the histograms of the dynamic events in all trace arrays of `tracefs`.

    The caller must have disarmed all probes, because they would be hit by the requests of this function.
    """
    lines = (tracefs / "dynamic_events").read_text().splitlines()
    # The line of a synthetic event may have no group.
    events = [line.split()[0].partition(":")[2] for line in lines if not line.startswith("s:")]
    synthetic = (tracefs / "synthetic_events").read_text().splitlines()
    events += [f"{_SYNTHETIC}{line.split()[0]}" for line in synthetic]
    for array in (tracefs, *(tracefs / "instances").iterdir()):
        name = "" if array == tracefs else array.name
        for event in events:
            with suppress(OSError):
                text = (array / "events" / event / "hist").read_text(errors="replace")
                for trigger, hits in _HIST.findall(text):
                    yield PastHist(name, event, trigger, int(hits))
