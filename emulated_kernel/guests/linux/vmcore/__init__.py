"""Mounts of vmcores: a dump's memory as a guest, calls of its functions, and its files."""
