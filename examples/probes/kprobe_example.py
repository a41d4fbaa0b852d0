#!/usr/bin/env python3
"""A kprobe with handlers before and behind the instruction, for section 8 of "Kernel Probes" (2010)."""

from __future__ import annotations

from typing import Any

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.util.config import MachineConfig


def before(kprobe: Kprobe, regs: Any) -> None:
    """Where the probe is, as the handler sees it: a breakpoint leaves ip behind itself."""
    print(f"pre_handler: {kprobe.symbol_name}, ip = {regs.ip:#x}, flags = {regs.flags:#x}")


def after(kprobe: Kprobe, regs: Any, _flags: int) -> None:
    """The instruction has run, out of line; Linux passes 0 as the last argument, and so do we."""
    print(f"post_handler: {kprobe.symbol_name}, ip = {regs.ip:#x}, flags = {regs.flags:#x}")


def main() -> None:
    """Plants it, calls the function, and takes it out again."""
    with Kernel(MachineConfig(profile="kprobes-2010")) as kernel:
        probe = Kprobe(symbol_name="int_sqrt", pre_handler=before, post_handler=after)
        kernel.register_kprobe(probe)
        print(f"planted at {probe.address:#x}")
        print(f"the root of 144 is {kernel.call('int_sqrt', 144)}")
        kernel.unregister_kprobe(probe)
        print(f"unregistered; {probe.nmissed} hits missed")


if __name__ == "__main__":
    main()
