"""A check of an address against a kernel's blacklist, by the result of the probe checker."""

from __future__ import annotations

from emulated_kernel.arch.analysis.reject_reason import RejectReason
from emulated_kernel.kernel.api import Kernel


def is_blacklisted(kernel: Kernel, addr: int) -> bool:
    finding = kernel.kprobes.probe_checker.may_probe(addr)
    return finding is not None and finding.reason is RejectReason.BLACKLISTED
