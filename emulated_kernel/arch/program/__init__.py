"""Handler programs: ops, their builder, and the architecture-independent part of lowering them to code.

Code that writes a handler uses ir.py and ir_builder.ProgramBuilder. Each architecture subclasses
base_lowering.Lowering. Programs are plain values that need no machine and no lock.
"""
