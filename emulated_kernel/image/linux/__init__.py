"""A distribution's own kernel: found, unpacked, and read as that kernel reads itself. x86_64 alone.

From outside: kernel.open_kernel() and the LinuxKernel that it gives, source.py, which finds files, and what
reads modules and dumps. It takes no lock and touches nothing of a kernel that runs.
"""
