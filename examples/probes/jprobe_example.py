#!/usr/bin/env python3
"""A jprobe, for section 9 of "Kernel Probes" (2010): its handler has the signature of the probed function."""

from __future__ import annotations

from emulated_kernel import Jprobe, Kernel, MachineConfig


def mirror(a: int, b: int) -> None:
    """Print the arguments; the signature is that of unsigned long gcd(unsigned long a, unsigned long b)."""
    print(f"jprobe: a = {a}, b = {b}")


def main() -> None:
    """Register the jprobe, call the function, and unregister the jprobe."""
    with Kernel(MachineConfig(profile="kprobes-2010")) as kernel:
        jprobe = Jprobe(handler=mirror, symbol_name="gcd")
        kernel.register_jprobe(jprobe)
        print(f"planted at {jprobe.kp.address:#x}")
        print(f"gcd(12, 18) = {kernel.call('gcd', 12, 18)}")
        kernel.unregister_jprobe(jprobe)
        print("unregistered")


if __name__ == "__main__":
    main()
