"""Mounts of a distribution's kernel.

native_mount shows the kernel's own files. probed_mount shows kprobefs's control files, through which the
kernel is probed.
"""
