"""Interfaces of tracefs: the grammar, texts and files of a version of Linux, as a set of rules."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import field
from types import MappingProxyType

from emulated_kernel.trace.text.error_log import ErrorTexts
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.linux_rule import LinuxRule

_PROBE = "kernel/trace/trace_probe.c"
_KPROBE = "kernel/trace/trace_kprobe.c"


class InterfaceRule(LinuxRule):
    """A rule of tracefs that not all versions of Linux have."""

    CHAR_TYPE = (
        "6.12",
        "fetch arguments have the type `char`",
        f"{_PROBE}:probe_fetch_types",
        "char, string",
    )
    FPROBE_EVENTS = (
        "6.12",
        "dynamic_events takes `f` lines: events at entries and returns of functions",
        "kernel/trace/trace_fprobe.c:trace_fprobe_create_internal",
        "f[:[<group>/][<event>]]",
    )


@dataclass(frozen=True, eq=False)
class Interface:
    """The interface of tracefs, which all parts of one kernel's tracing share.

    `rule in interface` tells whether the kernel has a rule.
    """

    name: str
    release: str
    """Release that the kernel reports if it is kprobefs's own."""
    rules: frozenset[InterfaceRule]
    texts: ErrorTexts = field(default_factory=dict)
    """Error -> the kernel's text, for the errors whose text differs from that of Linux 6.1."""

    def __contains__(self, rule: InterfaceRule) -> bool:
        return rule in self.rules


LINUX_6_1 = Interface("linux-6.1", "6.1.0", InterfaceRule.of("6.1"))
INTERFACES: Mapping[str, Interface] = MappingProxyType(
    {
        each.name: each
        for each in (
            LINUX_6_1,
            Interface("linux-6.1-fprobe", LINUX_6_1.release, LINUX_6_1.rules | {InterfaceRule.FPROBE_EVENTS}),
        )
    }
)
"""Name of an interface -> interface."""


def interface_named(name: str) -> Interface:
    """Return the interface with a name. Raises: KernelError EINVAL (unknown name)."""
    try:
        return INTERFACES[name]
    except KeyError:
        raise KernelError(errno.EINVAL, f"no interface {name}; there are {', '.join(INTERFACES)}") from None
