"""Text about probes for files: lines of kprobes/list, the mode, and the rule that prevents a better mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from emulated_kernel.arch.analysis.reject_reason import RejectReason
from emulated_kernel.image.kallsyms import Kallsyms
from emulated_kernel.kprobes.aggr_kprobe import AggrKprobe
from emulated_kernel.kprobes.hit.ftrace import FtraceSites
from emulated_kernel.kprobes.kprobe import Kprobe, KprobeFlag
from emulated_kernel.kprobes.optimizer.optimizer import Optimizer
from emulated_kernel.kprobes.table import ProbeTable

OPTIMIZATION_MESSAGES = {
    True: "kprobes: kprobe jump-optimization is enabled. All kprobes are optimized if possible.",
    False: "kprobes: kprobe jump-optimization is disabled. All kprobes are based on software breakpoint.",
}
"""Value of sysctl debug.kprobes-optimization -> message that Linux logs when the value changes."""


def mode(table: ProbeTable, sites: FtraceSites | None, kprobe: Kprobe) -> str:
    """Return a probe's present mode: int3, boosted, optimized, ftrace, disarmed or gone.

    `sites`: None if the kernel has no fentry sites.
    """
    if kprobe.is_gone:
        return "gone"
    if kprobe.is_disabled:
        # Other probes of the address may keep its jump.
        return "disarmed"
    head = table.valid(kprobe)
    if head is not None and head.is_patched:
        return "optimized"
    if head is None or head.is_disabled or table.all_disarmed:
        return "disarmed"
    if kprobe.is_ftrace:
        return "disarmed" if _is_ftrace_off(sites) else "ftrace"
    return "boosted" if head.insn is not None and head.insn.boosted else "int3"


def _is_ftrace_off(sites: FtraceSites | None) -> bool:
    return sites is not None and not sites.enabled


def why_unarmed(table: ProbeTable, sites: FtraceSites | None, kprobe: Kprobe) -> str:
    """Return the reason why a probe cannot be hit now, or "" if it can be hit.

    The reason is a clause in the past tense, for a report about a command that has ended. `sites`: None if
    the kernel has no fentry sites.
    """
    if kprobe.is_gone:
        return "the probed code was unloaded"
    if table.all_disarmed:
        return "kprobes/enabled was 0"
    head = table.valid(kprobe)
    if kprobe.is_disabled or head is None or head.is_disabled:
        # Linux: a kprobe that is enabled while all are disarmed stays disabled.
        return "the event was enabled while kprobes/enabled was 0, or disabled in kprobes/stats/"
    if kprobe.is_ftrace and _is_ftrace_off(sites):
        return "sysctl/kernel/ftrace_enabled was 0"
    return ""


def reason(
    table: ProbeTable,
    sites: FtraceSites | None,
    optimizer: Optimizer | None,
    kprobe: Kprobe,
    place: Callable[[int], str],
) -> str:
    """Return the first rule that keeps the probe from a better mode, or "" if there is no better mode.

    If the probe has a jump that Linux would refuse, return the methods beyond Linux's (tactics) that made the
    jump possible, and Linux's rule. `place`: function that returns an address as text. `sites`: None if the
    kernel has no fentry sites. `optimizer`: None if it has no jump optimization.
    """
    if kprobe.is_gone:
        rule = "the probed code is gone"
    elif kprobe.is_disabled:
        rule = "the probe is disabled"
    elif table.all_disarmed:
        rule = "all probes are disarmed, see kprobes/enabled"
    elif (head := table.valid(kprobe)) is None or head.is_disabled:
        rule = "enabled while all probes were disarmed: disable and enable it again"
    elif kprobe.is_ftrace and _is_ftrace_off(sites):
        rule = "ftrace is off, see sysctl/kernel/ftrace_enabled"
    elif kprobe.is_ftrace:
        rule = RejectReason.FTRACE.value
    elif head.is_patched:
        return _tactics(head, place)
    else:
        return str(head.rejection) or f"{place(kprobe.address)}: {_passing_rule(optimizer, head, place)}"
    return f"{place(kprobe.address)}: {rule}"


def _tactics(head: AggrKprobe, place: Callable[[int], str]) -> str:
    """Return the methods beyond Linux's (tactics) that made a probe's jump possible, and Linux's rule.

    Linux refuses the jump by this rule. Return "" if Linux does not refuse the jump. `place`: function that
    returns an address as text.
    """
    detour = head.detour
    if detour is None or detour.region.linux is None:
        return ""
    tactics = "; ".join(tactic.value for tactic in detour.region.tactics)
    return f"{place(head.address)}: optimized: {tactics} (Linux: {detour.region.linux.text})"


def _passing_rule(optimizer: Optimizer | None, head: AggrKprobe, place: Callable[[int], str]) -> str:
    """Return the rule that keeps a probe's jump out of the text at present; most such rules are temporary.

    `optimizer`: None if the kernel has no jump optimization. `place`: function that returns an address as
    text.
    """
    if optimizer is None:
        return str(RejectReason.NOT_BUILT.value)
    if head in optimizer.stages:
        return f"stopped by kprobes/stages: {optimizer.stage_text(head)}"
    if not optimizer.allowed:
        return "optimization is off, see kprobes/optimization"
    if head.detour is None:
        # This happens only with djprobes; the optimizer tries all other probes.
        return "registered without a length, so it is no djprobe"
    if head.jprobe is not None:
        return "a jprobe goes elsewhere from the breakpoint"
    if head.has_post_handler:
        return "a post_handler needs the step's end"
    if head.is_held:
        return "held unoptimized by a write to its `optimized`"
    other = optimizer.blocked_by(head)
    if other is not None:
        return f"the jump would cover the probe at {place(other.address)}"
    if head.is_optimized:
        return optimizer.why_queued()
    return "unoptimized for a probe that its jump covered"


_OWN = KprobeFlag.GONE.value | KprobeFlag.DISABLED.value
"""Flags of a user's probe that the probe's line in kprobes/list shows."""
_WAYS = KprobeFlag.OPTIMIZED.value | KprobeFlag.FTRACE.value
"""Flags of an address's aggregator that say how hits are handled. kprobes/list shows them for each probe."""


def _line_end(flags: int) -> str:
    shown = KprobeFlag(flags & (_OWN | _WAYS))
    own = "[GONE]" if shown & KprobeFlag.GONE else "[DISABLED]" if shown & KprobeFlag.DISABLED else ""
    optimized = "[OPTIMIZED]" if shown & KprobeFlag.OPTIMIZED else ""
    return own + optimized + ("[FTRACE]" if shown & KprobeFlag.FTRACE else "") + "\n"


_LINE_ENDS = tuple(_line_end(flags) for flags in range(2 * max(flag.value for flag in KprobeFlag)))
"""Sum of the flags (KprobeFlag) of a line in kprobes/list -> end of this line."""


def bucket_text(heads: Iterable[AggrKprobe], symbols: Kallsyms, bits: int = 64) -> str:
    """Return the lines in kprobes/list for the probes of one hash bucket.

    `heads`: the bucket's entries. `bits`: size of an address in bits.
    Mirrors: kernel/kprobes.c:show_kprobe_addr, report_probe (v6.1).
    """
    lines = []
    spec = f"0{bits // 4}x"
    for head in heads:
        ways = head.flags._value_ & _WAYS
        address = format(head.address, spec)
        text = head.list_text or _list_text(head, symbols)
        for kprobe in head.by_run:
            lines.append(f"{address}  {kprobe._kind}  {text}{_LINE_ENDS[kprobe.flags._value_ & _OWN | ways]}")
    return "".join(lines)


def _list_text(head: AggrKprobe, symbols: Kallsyms) -> str:
    """Return symbol and offset of `head` as kprobes/list shows them; only the address if it has no symbol."""
    where = symbols.lookup(head.address)
    if where is None:
        return f"0x{head.address:x} "
    text = f"{where.symbol.name}+0x{where.offset:x}  {where.module or ' '} "
    if not where.module:
        head.list_text = text
    return text


def stopped_lines(
    heads: Iterable[AggrKprobe], optimizer: Optimizer, symbols: Kallsyms, bits: int = 64
) -> Iterator[str]:
    """Iterate over a hash bucket's lines in kprobes/stages: one for each probe where patching has stopped.

    `heads`: the bucket's entries. `bits`: size of an address in bits.
    """
    for head in heads:
        if head in optimizer.stages:
            text = head.list_text or _list_text(head, symbols)
            yield f"{head.address:0{bits // 4}x}  {text.rstrip()}  {optimizer.stage_text(head)}\n"


def blacklist_lines(
    blacklist: Iterable[tuple[int, int, str]], symbols: Kallsyms, bits: int = 64
) -> Iterator[str]:
    """Iterate over the lines of kprobes/blacklist.

    `blacklist`: start, exclusive end and name of each blacklisted range. `bits`: size of an address in bits.

    Mirrors: kernel/kprobes.c:kprobe_blacklist_seq_show (v6.1).
    """
    digits = bits // 4
    for start, end, name in blacklist:
        where = symbols.lookup(start)
        module = f" [{where.module}]" if where is not None and where.module else ""
        yield f"0x{start:0{digits}x}-0x{end:0{digits}x}\t{name}{module}\n"
