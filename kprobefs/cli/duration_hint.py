"""A hint at the end of `run` and `trace`, if the shown durations are those of the virtual clock."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from emulated_kernel.util.lazy_pattern import lazy_pattern
from kprobefs.cli.nothing_hint import Past
from kprobefs.common.daemon_registry import running
from kprobefs.common.errors import CliError
from kprobefs.definitions.tracefs_files import HostFiles, control_root
from kprobefs.mount_options import CLOCKS, KERNEL_KPROBES

ENTRY = lazy_pattern(r"^\{ .*\} +hitcount: +(\d+)", re.MULTILINE)
COUNTING_CLOCK = "model"
"""Name of the clock that counts instructions, as `--clock` names it."""
SLOW_PATCHING = "--graph: the kernel patches all its functions, which takes long with the model clock"
FEWEST = 10
"""Minimum number of durations that a histogram must contain for a hint."""
HINT = (
    "the durations {where} count readings of the virtual clock, which advances with readings and not with "
    "the work done; use --clock model or real"
)
HINT_LINE = lazy_pattern("kprobefs: " + re.escape(HINT).replace(re.escape("{where}"), ".*"))
"""Pattern of the line with a hint that `run` and `trace` print."""


def follows_virtual_clock(directory: str) -> bool:
    """Return True if the kernel of the mount at `directory` runs on the virtual clock now."""
    with suppress(OSError):
        # A distribution's kernel has no such file, and keeps the clock of its start.
        text = (control_root(directory) / "machine" / "clock").read_text()
        return f"mode {CLOCKS[0]}" in text.splitlines()
    daemon = running(directory)
    return daemon is not None and daemon.clock == CLOCKS[0]


def patches_slowly(directory: str) -> bool:
    """Return True if the kernel of the mount at `directory` takes long to begin and end a call graph.

    This is so if the kernel patches its functions itself while each instruction is counted.
    """
    daemon = running(directory)
    return daemon is not None and (daemon.profile, daemon.clock) == (KERNEL_KPROBES, COUNTING_CLOCK)


def virtual_durations(directory: str, past: Past) -> Iterator[str]:
    """Yield one hint if a histogram of the mount at `directory` has durations of the virtual clock.

    Only histograms of synthetic events are examined, and only if a trigger computes with `common_timestamp`.
    `past` contains the removed histograms and triggers. The caller must have disarmed all probes, because
    they would be hit by the requests of this function. So the mount must be about to end.
    """
    with suppress(OSError, CliError):
        tracefs = Path(directory, HostFiles(directory).tracefs())
        for event, hits in _histograms(tracefs, past):
            if hits >= FEWEST and (past.reads_clock or any(_measures(tracefs))):
                yield HINT.format(where=f"of {event}")
                return


def _histograms(tracefs: Path, past: Past) -> Iterator[tuple[str, int]]:
    """Yield (event, hits of a histogram) for the histograms of synthetic events.

    Histograms that were removed, which `past` contains, are yielded, too.
    """
    for line in (tracefs / "synthetic_events").read_text().splitlines():
        event = line.split()[0]
        yield event, sum(_entries(tracefs / "events" / "synthetic" / event / "hist"))
    yield from past.removed_hists.items()


def _entries(hist: Path) -> list[int]:
    """Return the hit counts of a histogram's entries."""
    return [int(hits) for hits in ENTRY.findall(hist.read_text())]


def _measures(tracefs: Path) -> Iterator[bool]:
    """Yield, for each trigger file of a probe's event, whether the file contains `common_timestamp`."""
    lines = (tracefs / "dynamic_events").read_text().splitlines()
    groups = {line.partition(":")[2].partition("/")[0] for line in lines if not line.startswith("s:")}
    for group in sorted(groups):
        for trigger in (tracefs / "events" / group).glob("*/trigger"):
            with suppress(OSError):
                yield "common_timestamp" in trigger.read_text()
