"""The text of kprobes/list and kprobes/blacklist."""

from __future__ import annotations

from collections.abc import Iterable

from emulated_kernel.arch.analysed import Location, Symbols
from emulated_kernel.kprobes.kprobe import AggregatorProbe, Kprobe, KprobeFlag

_OWN = KprobeFlag.GONE.value | KprobeFlag.DISABLED.value
"""Flags of the user's probe that its line shows."""
_WAYS = KprobeFlag.OPTIMIZED.value | KprobeFlag.FTRACE.value
"""Flags of the address's entry that tell how a hit comes; the other flags are the users' probes' own."""


def _line_end(flags: int) -> str:
    shown = KprobeFlag(flags & (_OWN | _WAYS))
    own = "[GONE]" if shown & KprobeFlag.GONE else "[DISABLED]" if shown & KprobeFlag.DISABLED else ""
    optimized = "[OPTIMIZED]" if shown & KprobeFlag.OPTIMIZED else ""
    return own + optimized + ("[FTRACE]" if shown & KprobeFlag.FTRACE else "") + "\n"


_LINE_ENDS = tuple(map(_line_end, range(2 * max(flag.value for flag in KprobeFlag))))
"""How a line ends, by the flags."""


def bucket_text(probes: Iterable[Kprobe], symbols: Symbols, bits: int = 64) -> str:
    """The lines of a bucket's probes. Mirrors: kernel/kprobes.c:show_kprobe_addr, report_probe (v6.1)."""
    lines = []
    for probe in probes:
        ways = probe.flags._value_ & _WAYS
        for member in probe.members if isinstance(probe, AggregatorProbe) else (probe,):
            where = member.place or place(member, member.address, symbols.lookup(member.address), bits)
            lines.append(where + _LINE_ENDS[member.flags._value_ & _OWN | ways])
    return "".join(lines)


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
