"""Whether a kernel's blacklist forbids an address, by the verdict's finding."""

from __future__ import annotations

from emulated_kernel.arch.analysis.reason import Reason
from emulated_kernel.kernel import Kernel


def is_blacklisted(kernel: Kernel, addr: int) -> bool:
    finding = kernel.kprobes.verdict.may_probe(addr)
    return finding is not None and finding.reason is Reason.BLACKLISTED
