"""Distributions' kernels: unpacking of their files, and decoding of their tables.

linux_kernel.open_kernel() returns a LinuxKernel. open_image finds and opens kernel files, module_files reads
files of modules, and vmcore reads dumps. No module here uses a running kernel. The only lock is held while a
package is read (module_files.py). No other lock is taken while it is held, because modules are read before
the control lock is taken.
"""
