"""The emulated CPUs: registers, memory map and calling convention of each instruction set.

Each architecture implements `model.CpuModel`. `registers.Regs` are the live registers of the current CPU;
`register_sets` has tuples of register values for x86. machine/cpu_parts.py selects a model by name.
"""
