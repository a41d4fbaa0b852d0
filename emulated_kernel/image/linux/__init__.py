"""Distributions' kernels: unpacking of their files, and decoding of their tables.

The interface is linux_kernel.open_kernel() with its LinuxKernel, open_image, which finds kernel files,
module_files and vmcore. No module here uses a running kernel. The only lock is held while a package is read
(module_files.py). No other lock is taken while it is held: modules are read before the control lock is taken.
"""
