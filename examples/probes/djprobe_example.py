#!/usr/bin/env python3
"""Djprobes (section 3 of "Djprobe", OLS 2007), with analysed lengths, and one commit for all of them."""

from __future__ import annotations

from emulated_kernel import Kernel, Kprobe, MachineConfig, X86Regs

FUNCTIONS = ("int_sqrt", "strlen")


def main() -> None:
    """Register a djprobe on each function, commit them, and unregister them again."""
    hits: list[str] = []

    def handler(kprobe: Kprobe, _regs: X86Regs) -> None:
        hits.append(f"{kprobe.symbol_name}")

    with Kernel(MachineConfig(profile="djprobe-2007")) as kernel:
        probes = []
        for name in FUNCTIONS:
            region = kernel.optimized_region(kernel.kallsyms_lookup_name(name))
            probe = Kprobe(symbol_name=name, length=len(region), pre_handler=handler)
            kernel.register_kprobe(probe)
            probes.append(probe)
            print(f"{name}: a region of {len(region)} bytes, {kernel.probe_mode(probe)} before the commit")
        kernel.commit_kprobes()
        for probe in probes:
            print(f"{probe.symbol_name}: {kernel.probe_mode(probe)} after it")
        kernel.call("int_sqrt", 144)
        kernel.call("strlen", "probes")
        print(f"hits: {', '.join(hits)}")
        for probe in probes:
            kernel.unregister_kprobe(probe)
        kernel.commit_kprobes()
        print(f"bytes of text that differ: {len(kernel.patched_addresses())}")


if __name__ == "__main__":
    main()
