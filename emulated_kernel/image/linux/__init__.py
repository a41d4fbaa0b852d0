"""Distribution kernels (x86_64 only): unpacking of their files, and decoding of their own tables.

The interface is linux_kernel.open_kernel() and its LinuxKernel, open_image, which finds kernel files,
module_files and vmcore. Nothing here uses a running kernel. The only lock is held while a package is read
(module_files.py), and no other lock is taken inside it: modules are read before the control lock is taken.
"""
