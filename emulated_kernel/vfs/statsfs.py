"""kprobes/stats/: one directory a probe, with what Linux doesn't tell about it."""

from __future__ import annotations

import errno
from collections.abc import Callable

from emulated_kernel.errors import KernelError
from emulated_kernel.vfs.node import Directory, DynamicDirectory, File, Node, Objects
from emulated_kernel.vfs.parse import kstrtoul, switch
from emulated_kernel.vfs.ports import ProbeStats, StatsGroupPort, StatsPort
from emulated_kernel.vfs.seq import AttributeFile, SeqFile, single

DIRECTORY = 0o755
READ_WRITE = 0o644
READ_ONLY = 0o444


def stats_directory(stats: StatsPort) -> Directory:
    """stats/<group>/<event>/..."""
    return DynamicDirectory(DIRECTORY, Objects(stats.names, stats.find, _group_directory))


def _group_directory(group: StatsGroupPort) -> Directory:
    return DynamicDirectory(DIRECTORY, Objects(group.names, group.find, _probe_directory))


def _probe_directory(probe: ProbeStats) -> Directory:
    return Directory(
        DIRECTORY,
        {
            "hits": _counter(lambda: probe.hits, probe.reset_hits),
            "nmissed": _counter(lambda: probe.nmissed, probe.reset_nmissed),
            "mode": _text(lambda: probe.mode),
            "enabled": _switch(lambda: probe.enabled, probe.set_enabled),
            "optimized": _switch(lambda: probe.optimized, probe.set_optimized),
            "reason": _text(lambda: probe.reason),
            "address": _text(lambda: probe.address),
            "bytes": _text(lambda: probe.bytes),
            "detour": _text(lambda: probe.detour),
            "cost": _text(lambda: probe.cost),
            **(_return_files(probe) if probe.is_return else {}),
        },
    )


def _return_files(probe: ProbeStats) -> dict[str, Node]:
    return {
        "active": _text(lambda: str(probe.active)),
        "maxactive": _text(lambda: str(probe.maxactive)),
        "high_water": _text(lambda: str(probe.high_water)),
        "memory": _text(lambda: str(probe.memory)),
    }


def _counter(value: Callable[[], int], reset: Callable[[], None]) -> File:
    def store(data: bytes) -> None:
        if kstrtoul(data) != 0:
            raise KernelError(errno.EINVAL, "a counter can be set to 0 alone")
        reset()

    return AttributeFile(READ_WRITE, show=lambda: f"{value()}\n", store=store)


def _switch(value: Callable[[], bool], set_value: Callable[[bool], None]) -> File:
    return AttributeFile(
        READ_WRITE, show=lambda: f"{value():d}\n", store=lambda data: set_value(switch(data))
    )


def _text(value: Callable[[], str]) -> File:
    """A text of whole lines; an empty one is an empty file."""
    return SeqFile(READ_ONLY, single(lambda: f"{text}\n" if (text := value()) else ""))
