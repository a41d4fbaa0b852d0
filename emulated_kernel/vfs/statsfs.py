"""kprobes/stats/: one directory a probe, with what Linux doesn't tell about it."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable

from emulated_kernel.errors import KernelError
from emulated_kernel.vfs.mount import Client
from emulated_kernel.vfs.node import Directory, DynamicDirectory, File, Node, Objects, Owner
from emulated_kernel.vfs.parse import kstrtoul, switch
from emulated_kernel.vfs.ports import ProbeStats, StatsGroupPort, StatsPort
from emulated_kernel.vfs.seq import AttributeFile, PerClientFile, Records, SeqFile, single

DIRECTORY = 0o755
READ_WRITE = 0o644
READ_ONLY = 0o444
_ADDRESS = re.compile(r"0x([0-9a-f]{8,})")
"""What is as long as an address is taken for one."""


def stats_directory(stats: StatsPort, owner: Owner) -> Directory:
    """stats/<group>/<event>/...; `owner` may see addresses."""

    def group_directory(group: StatsGroupPort) -> Directory:
        return DynamicDirectory(DIRECTORY, Objects(group.names, group.find, probe_directory))

    def probe_directory(probe: ProbeStats) -> Directory:
        return _probe_directory(probe, owner)

    return DynamicDirectory(DIRECTORY, Objects(stats.names, stats.find, group_directory))


def _probe_directory(probe: ProbeStats, owner: Owner) -> Directory:
    return Directory(
        DIRECTORY,
        {
            "hits": _counter(lambda: probe.hits, probe.reset_hits),
            "nmissed": _counter(lambda: probe.nmissed, probe.reset_nmissed),
            "mode": _text(lambda: probe.mode),
            "enabled": _switch(lambda: probe.enabled, probe.set_enabled),
            "optimized": _switch(lambda: probe.optimized, probe.set_optimized),
            "reason": _addressed(lambda: probe.reason, owner),
            "address": _addressed(lambda: probe.address, owner),
            "bytes": _text(lambda: probe.bytes),
            "detour": _addressed(lambda: probe.detour, owner),
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
    return SeqFile(READ_ONLY, single(_whole(value)))


def _addressed(value: Callable[[], str], owner: Owner) -> File:
    """A text with addresses in it, which are 0 for who may not know them, as in kallsyms."""

    def records_for(client: Client) -> Records:
        if owner.is_privileged(client):
            return single(_whole(value))
        return single(_whole(lambda: _ADDRESS.sub(lambda found: "0x" + "0" * len(found[1]), value())))

    return PerClientFile(READ_ONLY, records_for)


def _whole(value: Callable[[], str]) -> Callable[[], str]:
    return lambda: f"{text}\n" if (text := value()) else ""
