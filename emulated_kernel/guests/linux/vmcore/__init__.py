"""Kernels of vmcores: memory, callable functions, mount."""
