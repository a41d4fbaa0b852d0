#!/usr/bin/env python3
"""A kprobe with handlers before and after the instruction, for section 8 of "Kernel Probes" (2010)."""

from __future__ import annotations

from emulated_kernel import Kernel, Kprobe, MachineConfig, X86Regs


def before(kprobe: Kprobe, regs: X86Regs) -> None:
    """Print the probed function and two registers; regs.ip is the address after the breakpoint."""
    print(f"pre_handler: {kprobe.symbol_name}, ip = {regs.ip:#x}, flags = {regs.flags:#x}")


def after(kprobe: Kprobe, regs: X86Regs, _flags: int) -> None:
    """Print two registers after the instruction, which has run out of line; `_flags` is always 0."""
    print(f"post_handler: {kprobe.symbol_name}, ip = {regs.ip:#x}, flags = {regs.flags:#x}")


def main() -> None:
    """Register the probe, call the function, and unregister the probe."""
    with Kernel(MachineConfig(profile="kprobes-2010")) as kernel:
        probe = Kprobe(symbol_name="int_sqrt", pre_handler=before, post_handler=after)
        kernel.register_kprobe(probe)
        print(f"planted at {probe.address:#x}")
        print(f"the root of 144 is {kernel.call('int_sqrt', 144)}")
        kernel.unregister_kprobe(probe)
        print(f"unregistered; {probe.nmissed} hits missed")


if __name__ == "__main__":
    main()
