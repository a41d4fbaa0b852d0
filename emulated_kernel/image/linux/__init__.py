"""Distributions' kernels: unpacking of their files, and decoding of their tables.

linux_kernel.open_kernel() returns a LinuxKernel. open_image finds and opens kernel files, module_files reads
files of modules, and vmcore reads dumps. No module here uses a running kernel.

The subpackage has one lock, which module_files.py holds while it reads a package. No other lock is taken
while this lock is held. Callers read module files before they take the control lock.
"""
