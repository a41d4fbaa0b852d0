#!/usr/bin/env python3
"""A jprobe, for section 9 of "Kernel Probes" (2010): a function of the same signature sees the arguments."""

from __future__ import annotations

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.jprobe import Jprobe
from emulated_kernel.util.config import MachineConfig


def mirror(a: int, b: int) -> None:
    """As unsigned long gcd(unsigned long a, unsigned long b)."""
    print(f"jprobe: a = {a}, b = {b}")


def main() -> None:
    """Plants it, calls the function, and takes it out again."""
    with Kernel(MachineConfig(profile="kprobes-2010")) as kernel:
        jprobe = Jprobe(handler=mirror, symbol_name="gcd")
        kernel.register_jprobe(jprobe)
        print(f"planted at {jprobe.kp.address:#x}")
        print(f"gcd(12, 18) = {kernel.call('gcd', 12, 18)}")
        kernel.unregister_jprobe(jprobe)
        print("unregistered")


if __name__ == "__main__":
    main()
