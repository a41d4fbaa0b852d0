"""Text that others patch, which a jump may not cover."""

from __future__ import annotations

from collections.abc import Sequence

from emulated_kernel.arch.function import Function, Site
from emulated_kernel.arch.reason import Finding, Reason


def overlapping(sites: Sequence[Site], first: int, last: int) -> Site | None:
    """The first of them with a byte in first..last, both inclusive."""
    return next((site for site in sites if site.overlaps(first, last)), None)


def reserved_range(function: Function, first: int, last: int, *, fentry_size: int) -> Finding | None:
    """What is in the way of a jump over first..last, both inclusive.

    Mirrors: arch/x86/kernel/kprobes/opt.c:copy_optimized_instructions (v6.1), its last lines.
    """
    fentry = tuple(Site(site, fentry_size) for site in function.fentry_sites)
    for sites, reason in (
        (fentry, Reason.RESERVED_BY_FTRACE),
        (function.jump_labels, Reason.RESERVED_BY_JUMP_LABEL),
        (function.static_calls, Reason.RESERVED_BY_STATIC_CALL),
    ):
        site = overlapping(sites, first, last)
        if site:
            return Finding(reason, site.addr)
    return None
