"""A hint at the end of `run`: why the histogram of a synthetic event is empty."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from emulated_kernel.util.lazy_pattern import lazy_pattern
from kprobefs.cli.nothing_hint import HITS
from kprobefs.common.errors import CliError
from kprobefs.definitions.tracefs_files import HostFiles

HINT = "the histogram of {event} is empty: {why}"
NO_FIRST_HIT = "{first} had no hit that sets a variable"
NO_HIT = "{last} had no hit"
NO_MATCH = "no hit of {last} found a variable that {first} had set for the same key ({keys})"
HINT_LINE = lazy_pattern(r"kprobefs: the histogram of \w+ is empty: .*")
"""Pattern of the line with a hint that `run` prints."""
_TOTAL = lazy_pattern(r"^ +Hits: (\d+)$", re.MULTILINE)
"""Pattern for the number of hits of a histogram in its `hist` file."""
_KEYS = lazy_pattern(r"\bkeys=([^:]+)")


def unmatched(directory: str) -> Iterator[str]:
    """Yield a hint for each synthetic event of the mount at `directory` whose histograms are empty.

    Only synthetic events that triggers of dynamic events cause are examined. The caller must have disarmed
    all probes, because they would be hit by the requests of this function.
    """
    with suppress(OSError, CliError):
        tracefs = Path(directory, HostFiles(directory).tracefs())
        synthetic = [line.split()[0] for line in (tracefs / "synthetic_events").read_text().splitlines()]
        empty = [name for name in synthetic if _hits(tracefs / "events" / "synthetic" / name) == 0]
        if empty:
            triggers = list(_triggers(tracefs))
        for event in empty:
            causes = re.compile(rf"\bonmatch\((\w+)\.(\w+)\)\.(?:trace\()?{event}\b")
            for last, trigger in triggers:
                if cause := causes.search(trigger):
                    keys = _KEYS.search(trigger)
                    why = _why(tracefs, (cause[1], cause[2]), last, keys[1] if keys else "")
                    if why:
                        yield HINT.format(event=event, why=why)
                    break


def _why(tracefs: Path, first: tuple[str, str], last: Path, keys: str) -> str:
    """Return the reason why no hit of an event caused a synthetic event; "" if it is unknown.

    `first`: group and name of the event whose trigger sets variables. `last`: directory of the event whose
    trigger causes the synthetic event if its keys match. `keys`: these keys, for the text.
    """
    if not _hits(tracefs / "events" / first[0] / first[1]):
        return NO_FIRST_HIT.format(first=first[1])
    if _hits(last):
        return ""
    profile = HITS.findall((tracefs / "kprobe_profile").read_text())
    if any((name, hits) == (last.name, "0") for name, hits, _ in profile):
        return NO_HIT.format(last=last.name)
    return NO_MATCH.format(last=last.name, first=first[1], keys=keys)


def _hits(event: Path) -> int | None:
    """Return the hits of all histograms of the event with the directory `event`; None if it has none.

    Linux does not count hits that miss a variable.
    """
    totals = _TOTAL.findall((event / "hist").read_text())
    return sum(map(int, totals)) if totals else None


def _triggers(tracefs: Path) -> Iterator[tuple[Path, str]]:
    """Yield (directory of an event, trigger) for each trigger of a dynamic event that is not synthetic."""
    lines = (tracefs / "dynamic_events").read_text().splitlines()
    for line in lines:
        kind, _, event = line.partition(" ")[0].partition(":")
        if kind != "s":
            for trigger in (tracefs / "events" / event / "trigger").read_text().splitlines():
                yield tracefs / "events" / event, trigger
