#!/usr/bin/env python3
"""Djprobes, for section 3 of "Djprobe" (OLS 2007): a length from the analysis, one commit for all."""

from __future__ import annotations

from typing import Any

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.util.config import MachineConfig

FUNCTIONS = ("int_sqrt", "strlen")


def main() -> None:
    """Plants one on each function, commits them, and takes them out again."""
    hits: list[str] = []

    def handler(kprobe: Kprobe, _regs: Any) -> None:
        hits.append(f"{kprobe.symbol_name}")

    with Kernel(MachineConfig(profile="djprobe-2007")) as kernel:
        probes = []
        for name in FUNCTIONS:
            address = kernel.image.kallsyms.lookup_name(name)
            assert address is not None
            region = kernel.kprobes.probe_checker.optimized_region(address)
            assert isinstance(region, Region), region
            probe = Kprobe(symbol_name=name, length=region.length, pre_handler=handler)
            kernel.register_kprobe(probe)
            probes.append(probe)
            print(
                f"{name}: a region of {region.length} bytes, {kernel.kprobes.mode(probe)} before the commit"
            )
        kernel.commit_kprobes()
        for probe in probes:
            print(f"{probe.symbol_name}: {kernel.kprobes.mode(probe)} behind it")
        kernel.call("int_sqrt", 144)
        kernel.call("strlen", "probes")
        print(f"hits: {', '.join(hits)}")
        for probe in probes:
            kernel.unregister_kprobe(probe)
        kernel.commit_kprobes()
        print(f"bytes of text that differ: {len(kernel.machine.text.ledger)}")


if __name__ == "__main__":
    main()
