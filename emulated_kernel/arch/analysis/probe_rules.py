"""Rules of the probe checks that only some versions of Linux have, and the named sets of these rules."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from types import MappingProxyType

from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.linux_rule import LinuxRule

_CORE = "arch/x86/kernel/kprobes/core.c"


class ProbeRule(LinuxRule):
    """A rule about kprobes that only some versions of Linux have, such as a reason to refuse a probe."""

    EXCEPTION_INSNS = (
        "6.12",
        "a probe on `int3`, `int N`, `into`, `int1`, `ud0`, `ud1` or `ud2` is refused with EILSEQ",
        f"{_CORE}:is_exception_insn",
    )
    BOOST_BY_MODRM = (
        "6.12",
        "shifts, `test`, `not`, `neg`, `mul`, `div`, `inc` and `dec` are boosted and optimized",
        f"{_CORE}:can_boost",
    )
    NO_JUMP_TABLES = (
        "6.12",
        "an indirect jump is a hazard only in builds with jump tables, without retpolines and landing pads",
        "arch/x86/kernel/kprobes/opt.c:can_optimize",
    )
    MAXACTIVE_TEN = (
        "6.12",
        "the default maxactive is at least 10; earlier, it is the number of CPUs without preemption",
        "kernel/kprobes.c:register_kretprobe",
    )
    RISCV_RECORDS = (
        "7.2",
        "a hit of a breakpoint of RISC-V's own kprobes is recorded; earlier, it is only counted",
        "kernel/trace/ring_buffer.c:rb_reserve_next_event",
    )


ProbeRules = frozenset[ProbeRule]
PROBE_RULES: Mapping[str, ProbeRules] = MappingProxyType(
    {f"linux-{version}": ProbeRule.of(version) for version in ("5.10", "6.1", "6.12", "7.2")}
)
"""Name of a set of rules (for example `linux-6.1`) -> the rules in the set."""


def probe_rules_named(name: str) -> ProbeRules:
    """Return the set of rules called `name` in PROBE_RULES. Raises: KernelError EINVAL (unknown name)."""
    try:
        return PROBE_RULES[name]
    except KeyError:
        raise KernelError(
            errno.EINVAL, f"no probe rules {name!r}; there are {', '.join(PROBE_RULES)}"
        ) from None
