#!/usr/bin/env python3
"""A handler in assembly that counts hits and keeps the largest argument, entirely in the guest."""

from __future__ import annotations

import argparse

from emulated_kernel import Kernel, Kprobe, MachineConfig

CODE = {
    "x86_64": """
        inc qword ptr [hits]
        cmp rdi, [largest]
        jbe done
        mov [largest], rdi
    done:
    """,
    "i386": """
        add dword ptr [hits], 1
        adc dword ptr [hits + 4], 0
        cmp eax, [largest]
        jbe done
        mov [largest], eax
    done:
    """,
    "riscv64": """
        la   t0, hits
        li   t1, 1
        amoadd.d zero, t1, (t0)
        ld   t2, largest
        bleu a0, t2, done
        sd   a0, largest, t0
    done:
    """,
}
"""Architecture -> assembly of the handler. The first argument of int_sqrt is in rdi, eax or a0."""


def main() -> None:
    """Register the probe, call the function, and print the cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", choices=CODE, default="x86_64")
    arch = parser.parse_args().arch
    with Kernel(MachineConfig(arch=arch)) as kernel:
        probe = Kprobe(symbol_name="int_sqrt", code=CODE[arch])
        kernel.register_kprobe(probe)
        roots = [kernel.call("int_sqrt", number) for number in (81, 144, 9)]
        print(f"roots {roots}, by {kernel.probe_mode(probe)}")
        kernel.unregister_kprobe(probe)
        print(f"{probe.cells['hits']} hits, the largest argument {probe.cells['largest']}")


if __name__ == "__main__":
    main()
