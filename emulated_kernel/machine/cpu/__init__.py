"""The CPUs that are emulated: registers, memory map and calling convention of each instruction set.

`model.CpuModel` is the list that an architecture fills; `registers.Regs` are the live registers of the
current CPU, `register_sets` a complete set of x86's values. machine/cpu_parts.py picks by name.
"""
