"""Instruction sets: all architecture-specific code, which other layers use through `arch_hooks.Arch`.

Other layers call `architectures.arch_named()` to get an `Arch`, and use the probe checks of probe_checks.py.
No module here takes a lock. The input is machine code and the kernel's tables; the output is code, rejections
of probes, and regions (the instructions that jumps replace). Only emulations change a kernel: they run at a
hit, on the registers and memory of the probed code.
"""
