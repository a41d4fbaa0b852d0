"""Handler programs: their ops, how they are built, and the architecture-independent part of lowering.

Code that writes a handler uses ir.py and ir_builder.ProgramBuilder. Each architecture subclasses
base_lowering.Lowering. Programs are plain values that need no machine and no lock.
"""
