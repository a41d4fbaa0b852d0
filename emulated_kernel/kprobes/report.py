"""Text about probes for files: kprobes/list, modes, and the rule that prevents a better mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.image.kallsyms import Kallsyms
from emulated_kernel.kprobes.kprobe import AggrKprobe, Kprobe, KprobeFlag
from emulated_kernel.kprobes.optimizer.optimizer import Optimizer
from emulated_kernel.kprobes.table import ProbeTable

OPTIMIZATION_MESSAGES = {
    True: "kprobes: kprobe jump-optimization is enabled. All kprobes are optimized if possible.",
    False: "kprobes: kprobe jump-optimization is disabled. All kprobes are based on software breakpoint.",
}
"""Messages that Linux logs if the sysctl changes."""


def mode(table: ProbeTable, kprobe: Kprobe) -> str:
    """Return the mode: int3, boosted, optimized, ftrace, disarmed or gone, as the text is now."""
    if kprobe.is_gone:
        return "gone"
    if table.is_patched(kprobe):
        return "optimized"
    if not table.is_armed(kprobe) or kprobe.is_disabled:
        return "disarmed"
    if kprobe.is_ftrace:
        return "ftrace"
    return "boosted" if kprobe.state.insn is not None and kprobe.state.insn.boosted else "int3"


def reason(table: ProbeTable, optimizer: Optimizer | None, kprobe: Kprobe) -> str:
    """Return the first rule that keeps the probe from a better mode; empty if there is no better mode."""
    if kprobe.is_gone:
        rule = "the probed code is gone"
    elif kprobe.is_disabled:
        rule = "the probe is disabled"
    elif table.all_disarmed:
        rule = "all probes are disarmed, see kprobes/enabled"
    elif not table.is_armed(kprobe):
        rule = "enabled while all probes were disarmed: disable and enable it again"
    elif kprobe.is_ftrace:
        return Rejection(RejectReason.FTRACE, kprobe.address).text
    elif table.is_patched(kprobe):
        return ""
    else:
        rejection = str(kprobe.state.rejection)
        return rejection or f"0x{kprobe.address:x}: {_passing_rule(table, optimizer, kprobe)}"
    return f"0x{kprobe.address:x}: {rule}"


def _passing_rule(table: ProbeTable, optimizer: Optimizer | None, kprobe: Kprobe) -> str:
    """Return a rule that may cease to apply while the armed probe exists."""
    head = table.valid(kprobe)
    if optimizer is None:
        return str(RejectReason.NOT_BUILT.value)
    if not optimizer.allowed:
        return "optimization is off, see kprobes/optimization"
    if not isinstance(head, AggrKprobe) or head.detour is None:
        # This happens only with djprobes; the optimizer tries all other probes.
        return "registered without a length, so it is no djprobe"
    if head.break_handler is not None:
        return "a jprobe goes elsewhere from the breakpoint"
    if head.post_handler is not None:
        return "a post_handler needs the step's end"
    if head.is_held:
        return "held unoptimized by a write to its `optimized`"
    other = optimizer.blocked_by(head)
    if other is not None:
        return f"the jump would cover the probe at 0x{other.address:x}"
    if head.is_optimized:
        return optimizer.queued
    return "unoptimized for a probe that its jump covered"


_OWN = KprobeFlag.GONE.value | KprobeFlag.DISABLED.value
"""Flags of the user's probe that its line shows."""
_WAYS = KprobeFlag.OPTIMIZED.value | KprobeFlag.FTRACE.value
"""Flags of the address's entry that show how hits are taken; other flags belong to the users' probes."""


def _line_end(flags: int) -> str:
    shown = KprobeFlag(flags & (_OWN | _WAYS))
    own = "[GONE]" if shown & KprobeFlag.GONE else "[DISABLED]" if shown & KprobeFlag.DISABLED else ""
    optimized = "[OPTIMIZED]" if shown & KprobeFlag.OPTIMIZED else ""
    return own + optimized + ("[FTRACE]" if shown & KprobeFlag.FTRACE else "") + "\n"


_LINE_ENDS = tuple(_line_end(flags) for flags in range(2 * max(flag.value for flag in KprobeFlag)))
"""Value of flags -> end of the line."""


def bucket_text(probes: Iterable[Kprobe], symbols: Kallsyms, bits: int = 64) -> str:
    """Return the lines of a bucket's probes.

    Mirrors: kernel/kprobes.c:show_kprobe_addr, report_probe (v6.1).
    """
    lines = []
    for probe in probes:
        ways = probe.flags._value_ & _WAYS
        for member in probe.members if isinstance(probe, AggrKprobe) else (probe,):
            address = member.address
            where = member.state.place or member.line_head(address, symbols.lookup(address), bits)
            lines.append(where + _LINE_ENDS[member.flags._value_ & _OWN | ways])
    return "".join(lines)


def blacklist_lines(
    blacklist: Iterable[tuple[int, int, str]], symbols: Kallsyms, bits: int = 64
) -> Iterator[str]:
    """Iterate over the lines of the blacklist. Mirrors: kernel/kprobes.c:kprobe_blacklist_seq_show (v6.1)."""
    digits = bits // 4
    for start, end, name in blacklist:
        where = symbols.lookup(start)
        module = f" [{where.module}]" if where is not None and where.module else ""
        yield f"0x{start:0{digits}x}-0x{end:0{digits}x}\t{name}{module}\n"
