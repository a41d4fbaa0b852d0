"""A distribution's own kernel: found, unpacked, and read as that kernel reads itself. x86_64 alone.

From outside: kernel.open_kernel() and the LinuxKernel that it gives, source.py, which finds files, and what
reads modules and dumps. It touches nothing of a kernel that runs, and takes no lock but one of its own
around a package's file (module_files.py), within which nothing else is called: modules are read before the
control lock is taken.
"""
