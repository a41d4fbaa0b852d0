"""What is told of a probe beside Linux's files: how its hits are taken, and why not better."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emulated_kernel.kprobes.kprobe import AggregatorProbe, Kprobe

if TYPE_CHECKING:
    from emulated_kernel.kprobes.registry import Kprobes

OPTIMIZATION_MESSAGES = {
    True: "kprobes: kprobe jump-optimization is enabled. All kprobes are optimized if possible.",
    False: "kprobes: kprobe jump-optimization is disabled. All kprobes are based on software breakpoint.",
}
"""What Linux logs at a change of the sysctl."""


def mode(kprobes: Kprobes, kprobe: Kprobe) -> str:
    """int3, boosted, optimized, ftrace, disarmed or gone, as the text stands now."""
    if kprobe.is_gone:
        return "gone"
    if kprobes.is_optimized(kprobe):
        return "optimized"
    if not kprobes.is_armed(kprobe) or kprobe.is_disabled:
        return "disarmed"
    if kprobe.is_ftrace:
        return "ftrace"
    return "boosted" if kprobe.insn is not None and kprobe.insn.boosted else "int3"


def reason(kprobes: Kprobes, kprobe: Kprobe) -> str:
    """The first rule that keeps the probe from a better mode; empty if there is no better one."""
    if kprobe.is_gone:
        rule = "the probed code is gone"
    elif kprobe.is_disabled:
        rule = "the probe is disabled"
    elif kprobes.all_disarmed:
        rule = "all probes are disarmed, see kprobes/enabled"
    elif not kprobes.is_armed(kprobe):
        rule = "enabled while all probes were disarmed: disable and enable it again"
    elif kprobe.is_ftrace:
        rule = "fentry site: ftrace calls the probe"
    elif kprobes.is_optimized(kprobe):
        return ""
    else:
        return _not_optimized(kprobes, kprobe)
    return f"0x{kprobe.address:x}: {rule}"


def _not_optimized(kprobes: Kprobes, kprobe: Kprobe) -> str:
    """Of an armed probe."""
    if kprobe.obstacle:
        return kprobe.obstacle
    return f"0x{kprobe.address:x}: {_passing_rule(kprobes, kprobe)}"


def _passing_rule(kprobes: Kprobes, kprobe: Kprobe) -> str:
    """What may change while the probe lives."""
    optimizer, head = kprobes.optimizer, kprobes.head(kprobe)
    if optimizer is None:
        return "this kernel is built without jump optimization"
    if not optimizer.allowed:
        return "optimization is off, see kprobes/optimization"
    if not isinstance(head, AggregatorProbe) or head.detour is None:
        # Djprobe's alone: the optimizer tries all others.
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
