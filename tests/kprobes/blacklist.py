"""Whether an address is in a kernel's kprobe blacklist, as the probe checker decides."""

from __future__ import annotations

from emulated_kernel.arch.analysis.reject_reason import RejectReason
from emulated_kernel.kernel.api import Kernel


def is_blacklisted(kernel: Kernel, addr: int) -> bool:
    finding = kernel.kprobes.probe_checker.may_probe(addr)
    return finding is not None and finding.reason is RejectReason.BLACKLISTED
