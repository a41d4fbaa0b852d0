"""Instruction sets: all architecture-specific code, which other layers use through `arch_hooks.Arch`.

Other layers call `architectures.arch_named()` to get an `Arch`, and use the probe checks of probe_checks.py.
No module here takes a lock. The input is bytes and tables; the output is code, rejections and regions. Only
emulations change a kernel: they run at a hit, on the registers and memory of the probed code.
"""
