"""A hint at the end of `run` and `trace`: that the shown durations are those of the virtual clock."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from emulated_kernel.util.lazy_pattern import lazy_pattern
from kprobefs.cli.nothing_hint import Past
from kprobefs.common.daemon_registry import running
from kprobefs.definitions.tracefs_files import control_root
from kprobefs.mount_options import CLOCKS, KERNEL_KPROBES

COUNTING_CLOCK = "model"
"""Name of the clock that counts instructions, as `--clock` names it."""
SLOW_PATCHING = "--graph: the kernel patches all its functions, which takes long with the model clock"
FEWEST = 10
"""Minimum number of durations in a histogram for which a hint is printed."""
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
    """Return True if the kernel of the mount at `directory` is slow to start and stop recording a call graph.

    This is so if a distribution's kernel uses its own kprobes, so that guest code patches the functions, and
    each instruction is counted.
    """
    daemon = running(directory)
    return daemon is not None and (daemon.profile, daemon.clock) == (KERNEL_KPROBES, COUNTING_CLOCK)


def virtual_durations(past: Past) -> Iterator[str]:
    """Yield one hint if a histogram in the history `past` may have durations of the virtual clock.

    That is so if two conditions hold. A histogram trigger of an event that is not synthetic uses
    `common_timestamp`, and a histogram of a synthetic event has at least FEWEST hits.
    """
    if any("common_timestamp" in hist.trigger for hist in past.hists if not hist.synthetic):
        shown = (hist.synthetic for hist in past.hists if hist.synthetic and hist.hits >= FEWEST)
        for event in islice(shown, 1):
            yield HINT.format(where=f"of {event}")
