#!/usr/bin/env python3
"""A return probe, for section 10 of "Kernel Probes" (2010): what a function returned, and how long it took.

kretprobe_example.py [FUNCTION]
"""

from __future__ import annotations

import sys
from typing import Any

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe, KretprobeInstance
from emulated_kernel.util.config import MachineConfig

ARGUMENTS = {"int_sqrt": (144,), "strlen": ("probes",)}
"""Of the functions that can be asked for."""
STAMP = 8
"""Bytes of a call's own data: when it was entered."""


def main(function: str = "int_sqrt") -> None:
    """Plants it, calls the function, and takes it out again."""
    with Kernel(MachineConfig(profile="kprobes-2010")) as kernel:
        clock = kernel.machine.clock

        def entered(instance: KretprobeInstance, _regs: Any) -> None:
            instance.data[:] = clock.read_ns().to_bytes(STAMP, "little")

        def returned(instance: KretprobeInstance, regs: Any) -> None:
            took = clock.read_ns() - int.from_bytes(instance.data, "little")
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
