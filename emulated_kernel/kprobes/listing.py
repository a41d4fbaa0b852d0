"""The text of kprobes/list and kprobes/blacklist."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from emulated_kernel.kprobes.kprobe import AggregatorProbe, Kprobe, KprobeFlag

_GOLDEN_RATIO = {64: 0x61C8864680B583EB, 32: 0x61C88647}
_TABLE_BITS = 6
"""Linux keeps 64 hash buckets, and lists them in their order."""


_OPTIMIZED, _FTRACE = KprobeFlag.OPTIMIZED.value, KprobeFlag.FTRACE.value
_WAYS = _OPTIMIZED | _FTRACE
_REACHED = {0: "", _OPTIMIZED: "[OPTIMIZED]", _FTRACE: "[FTRACE]", _WAYS: "[OPTIMIZED][FTRACE]"}
"""How a hit comes, by the flags of the address's entry; the other flags are the users' probes' own."""


class Location(Protocol):
    """A symbol and the offset into it, in bytes."""

    @property
    def symbol(self) -> Symbol: ...

    @property
    def offset(self) -> int: ...

    @property
    def module(self) -> str | None: ...


class Symbol(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def address(self) -> int: ...

    @property
    def size(self) -> int: ...


class Lookup(Protocol):
    def lookup(self, address: int, /) -> Location | None: ...


def bucket(addr: int, bits: int = 64) -> int:
    """The hash bucket of a probed address of so many bits. Mirrors: include/linux/hash.h:hash_ptr."""
    return (addr * _GOLDEN_RATIO[bits] & (1 << bits) - 1) >> (bits - _TABLE_BITS)


def in_list_order(probes: Iterable[Kprobe], bits: int = 64) -> list[Kprobe]:
    """Bucket by bucket, the latest registered address of a bucket first.

    `probes` come in the order of registration.
    """
    latest_first = list(probes)[::-1]
    return sorted(latest_first, key=lambda p: bucket(p.address, bits))


def list_lines(ordered: Iterable[Kprobe], symbols: Lookup, bits: int = 64, start: int = 0) -> Iterator[str]:
    """The lines from a number on, made when they are asked for.

    Mirrors: kernel/kprobes.c:show_kprobe_addr, report_probe (v6.1).
    """
    for probe in ordered:
        members = probe.members if isinstance(probe, AggregatorProbe) else (probe,)
        if start >= len(members):
            start -= len(members)
            continue
        reached = _REACHED[probe.flags._value_ & _WAYS]
        for member in members[start:]:
            own = "" if not member.is_disabled else "[GONE]" if member.is_gone else "[DISABLED]"
            where = member.place or place(member, member.address, symbols.lookup(member.address), bits)
            yield f"{where}{own}{reached}\n"
        start = 0


def place(probe: Kprobe, addr: int, where: Location | None, bits: int) -> str:
    """What a probe's line begins with; `where` is None in a module that has gone."""
    text = (
        f"0x{addr:x} " if where is None else f"{where.symbol.name}+0x{where.offset:x}  {where.module or ' '} "
    )
    return f"{addr:0{bits // 4}x}  {probe.kind}  {text}"


def blacklist_lines(blacklist: Iterable[tuple[int, int, str]], bits: int = 64) -> list[str]:
    """Mirrors: kernel/kprobes.c:kprobe_blacklist_seq_show (v6.1)."""
    digits = bits // 4
    return [f"0x{start:0{digits}x}-0x{end:0{digits}x}\t{name}\n" for start, end, name in blacklist]
