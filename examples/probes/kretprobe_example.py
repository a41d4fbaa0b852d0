#!/usr/bin/env python3
"""A return probe, for section 10 of "Kernel Probes" (2010), that prints a function's result and duration.

kretprobe_example.py [FUNCTION]
"""

from __future__ import annotations

import sys

from emulated_kernel import Kernel, Kretprobe, KretprobeInstance, MachineConfig, X86Regs

ARGUMENTS: dict[str, tuple[int | str, ...]] = {"int_sqrt": (144,), "strlen": ("probes",)}
"""Function -> arguments of the call."""
STAMP = 8
"""Size in bytes of the private data of a call: the time of its entry in nanoseconds."""


def main(function: str = "int_sqrt") -> None:
    """Register the probe, call the function, and unregister the probe."""
    with Kernel(MachineConfig(profile="kprobes-2010")) as kernel:

        def entered(instance: KretprobeInstance, _regs: X86Regs) -> None:
            instance.data[:] = kernel.ktime_get_ns().to_bytes(STAMP, "little")

        def returned(instance: KretprobeInstance, regs: X86Regs) -> None:
            took = kernel.ktime_get_ns() - int.from_bytes(instance.data, "little")
            assert instance.rp is rp
            print(
                f"{function} returned {kernel.regs_return_value(regs)} and took {took} ns of the guest's time"
            )

        rp = Kretprobe(
            symbol_name=function, entry_handler=entered, handler=returned, data_size=STAMP, maxactive=20
        )
        kernel.register_kretprobe(rp)
        print(f"planted at {rp.address:#x}")
        kernel.call(function, *ARGUMENTS[function])
        kernel.unregister_kretprobe(rp)
        print(f"unregistered; {rp.instances_missed} instances missed")


if __name__ == "__main__":
    main(*sys.argv[1:2])
