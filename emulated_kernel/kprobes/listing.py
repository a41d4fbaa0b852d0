"""The text of kprobes/list and kprobes/blacklist."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from emulated_kernel.kprobes.kprobe import AggregatorProbe, Kprobe

_GOLDEN_RATIO_64 = 0x61C8864680B583EB
_TABLE_BITS = 6
"""Linux keeps 64 hash buckets, and lists them in their order."""


class Location(Protocol):
    """A symbol and the offset into it, in bytes."""

    @property
    def symbol(self) -> Symbol: ...

    @property
    def offset(self) -> int: ...


class Symbol(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def address(self) -> int: ...

    @property
    def size(self) -> int: ...


class Lookup(Protocol):
    def lookup(self, address: int, /) -> Location | None: ...


def bucket(addr: int) -> int:
    """The hash bucket of a probed address. Mirrors: include/linux/hash.h:hash_ptr."""
    return ((addr * _GOLDEN_RATIO_64) & (2**64 - 1)) >> (64 - _TABLE_BITS)


def in_list_order(probes: Iterable[Kprobe]) -> list[Kprobe]:
    """Bucket by bucket, the latest registered address of a bucket first.

    `probes` come in the order of registration.
    """
    latest_first = list(probes)[::-1]
    return sorted(latest_first, key=lambda p: bucket(p.address))


def list_lines(probes: Iterable[Kprobe], symbols: Lookup) -> list[str]:
    """Mirrors: kernel/kprobes.c:show_kprobe_addr, report_probe (v6.1)."""
    lines: list[str] = []
    for probe in in_list_order(probes):
        members = probe.members if isinstance(probe, AggregatorProbe) else [probe]
        where = symbols.lookup(probe.address)
        lines.extend(_line(member, probe, where) for member in members)
    return lines


def _line(probe: Kprobe, head: Kprobe, where: Location | None) -> str:
    """The user's flags are the probe's own; how it is reached is told by the address's entry."""
    place = f"0x{probe.address:x} "
    if where is not None:
        place = f"{where.symbol.name}+0x{where.offset:x}    "
    flags = "[GONE]" if probe.is_gone else "[DISABLED]" if probe.is_disabled else ""
    if isinstance(head, AggregatorProbe) and head.is_optimized:
        flags += "[OPTIMIZED]"
    if head.is_ftrace:
        flags += "[FTRACE]"
    return f"{probe.address:016x}  {probe.kind}  {place}{flags}\n"


def blacklist_lines(blacklist: Iterable[tuple[int, int, str]]) -> list[str]:
    """Mirrors: kernel/kprobes.c:kprobe_blacklist_seq_show (v6.1)."""
    return [f"0x{start:016x}-0x{end:016x}\t{name}\n" for start, end, name in blacklist]
