"""Handler programs: their ops, how they are built, and what their lowering shares between architectures.

builder.ProgramBuilder and ops.py are for who writes a handler, lowering.Lowering for an architecture.
Values without a machine; no lock.
"""
