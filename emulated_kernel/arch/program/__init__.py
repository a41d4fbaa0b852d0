"""Handler programs: their ops, how they are built, and what their lowering shares between architectures."""
