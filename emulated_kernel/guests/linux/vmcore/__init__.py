"""Mounts of vmcores: a dump's memory becomes a guest, whose functions can be called.

The mount also shows the files of the dump.
"""
